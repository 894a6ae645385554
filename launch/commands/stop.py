"""`keepstep stop RUN`: ask a run to save and end, from any machine that sees its folder."""

import argparse
from pathlib import Path

from launch.commands.status import newest_ending, require_run
from train.errors import ConfigError
from train.records.events import EventLog
from train.run_folder import RunFolder


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder, such as runs/laptop")


def run(options: argparse.Namespace) -> int:
    require_run(options.run)
    folder = RunFolder(options.run)
    if ended := newest_ending(folder):
        raise ConfigError(f"{options.run} does not run: it has {ended}; a job that waits is ended with scancel")
    EventLog(folder.events)("stop_requested")  # tells slurm/train.sbatch not to requeue
    folder.stop_request.touch()
    print(f"asked {options.run} to save and stop; it does so after the step in hand")
    return 0
