"""`keepstep demo`: run the whole system on this machine in minutes (`launch/demo.py`)."""

import argparse
import time
from pathlib import Path

from launch.demo import Demo, run_demo
from launch.numbers import whole
from parallel.errors import LaunchError
from train.exit_codes import FAILED, FINISHED
from train.health.safe_output import protect_output


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep demo`."""
    parser.epilog = "example: keepstep demo --steps 60"
    parser.add_argument("--dir", type=Path, help="folder for everything (default: a new folder runs/demo-DATE-TIME)")
    parser.add_argument(
        "--steps", type=whole("--steps", 60, 1_000_000), default=120, help="optimizer steps, at least 60 (default: 120)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the demonstration; return exit code 1 if the killed run differs from the other."""
    protect_output()
    if options.steps < 60:
        raise LaunchError(f"--steps ({options.steps}) must be at least 60: a checkpoint must be saved before the kill")
    root = options.dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if root.exists() and any(root.iterdir()):
        raise LaunchError(f"--dir ({root}) is not empty; name a new folder")
    return FINISHED if run_demo(Demo(root, options.steps)) else FAILED
