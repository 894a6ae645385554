"""`keepstep stop`: ask a run to save and stop, from any machine that sees its folder."""

import argparse
import time
from pathlib import Path

from launch.inspect.run_state import ENDINGS, recent_events, run_state, waiting_jobs
from launch.inspect.run_status import require_run
from launch.terminal import add_json_option, print_json
from train.errors import ConfigError
from train.health.exhausted import exhaustion_in_one_line
from train.records.events import EventLog, read_events
from train.run_folder import RunFolder


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep stop`."""
    parser.epilog = "example: keepstep stop runs/laptop"
    parser.add_argument("run", type=Path, help="run folder, such as runs/laptop")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Leave the request in the run folder. ConfigError if the run has ended and no job of it may wait."""
    require_run(options.run)
    folder = RunFolder(options.run)
    state = run_state(folder, recent_events(folder.events, 0), time.time())
    jobs = waiting_jobs(read_events(folder.events, ["submitted", "stop_requested"]))
    if state == "finished" or (state in (*ENDINGS, "interrupted") and not jobs):
        was = "was interrupted (killed, or its node is lost)" if state == "interrupted" else f"has {state}"
        raise ConfigError(f"{options.run} is not running: it {was}; end a pending Slurm job with scancel")
    EventLog(folder.events)("stop_requested")  # slurm/train.sbatch neither requeues the job nor starts the next one
    waits = state in (*ENDINGS, "pending")
    if not waits:  # a file without a run would stop the next start
        with exhaustion_in_one_line(folder.root):
            folder.stop_request.touch()
    if options.json:
        print_json({"run": str(options.run), "stop_requested": True, "jobs": jobs})
        return 0
    if not waits:
        print(f"asked {options.run} to save and stop; it does so after its current step")
    if jobs:
        print(f"Slurm jobs of this run that wait end as they start (`scancel {' '.join(jobs)}` ends them now)")
    return 0
