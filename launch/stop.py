"""`keepstep stop RUN`: ask a run to save and end, from any machine that sees its folder."""

import argparse
from pathlib import Path

from launch.status import newest_ending, require_run
from train.run_folder import RunFolder


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder, such as runs/laptop")


def run(options: argparse.Namespace) -> int:
    require_run(options.run)
    folder = RunFolder(options.run)
    folder.stop_request.touch()
    ended = newest_ending(folder)
    print(f"asked {options.run} to save and stop; it does so after the step in hand")
    if ended:
        print(
            f"(its last event is {ended!r}: if it is not running, remove {folder.stop_request} before the next start)"
        )
    return 0
