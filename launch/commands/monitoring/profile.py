"""`keepstep profile`: ask a live run to profile its next steps, from any machine that sees its folder."""

import argparse
import time
from pathlib import Path

from launch.inspect.run_state import recent_events, run_state
from launch.inspect.run_status import require_run
from launch.numbers import whole
from launch.terminal import add_json_option, print_json
from train.errors import ConfigError
from train.health.exhausted import exhaustion_in_one_line
from train.profiling.config import MOST_STEPS, ProfileConfig
from train.profiling.request import ProfileRequest
from train.run_folder import RunFolder

ACTIVE = ("new", "running", "silent")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep profile`."""
    parser.epilog = "example: keepstep profile runs/laptop --steps 5"
    parser.add_argument("run", type=Path, help="run folder, such as runs/laptop")
    default = ProfileConfig().steps
    parser.add_argument(
        "--steps",
        type=whole("--steps", 1, MOST_STEPS),
        default=default,
        metavar="N",
        help=f"number of steps to profile (default: {default})",
    )
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Leave the request in the run folder. ConfigError if the run does not run."""
    require_run(options.run)
    folder = RunFolder(options.run)
    state = run_state(folder, recent_events(folder.events, 0), time.time())
    if state not in ACTIVE:
        raise ConfigError(
            f"{options.run} is not running (it is {state}), so it has no steps to profile; set train.profile.at to "
            "profile a run that is started later"
        )
    with exhaustion_in_one_line(folder.root):
        ProfileRequest(folder.profile_request).leave(options.steps)
    if options.json:
        print_json({"run": str(options.run), "steps": options.steps, "profiles": str(folder.profiles)})
        return 0
    print(f"asked {options.run} to profile {options.steps} steps, which begin after its current one")
    print(f"traces: {folder.profiles}/step-*/rank-*.json.gz; the largest costs: keepstep status {options.run}")
    return 0
