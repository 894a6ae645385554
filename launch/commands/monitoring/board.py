"""`keepstep board`: show the curves of runs in TensorBoard."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.inspect.run_status import require_run
from launch.numbers import whole
from train.errors import ConfigError
from train.run_folder import RunFolder

LARGEST_PORT = 65_535
SEPARATORS = ",:"
"""Characters that separate runs in TensorBoard's option for several folders."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep board`."""
    parser.epilog = "example: keepstep board runs/laptop runs/other\n\nCtrl-C ends TensorBoard."
    parser.add_argument("runs", type=Path, nargs="+", metavar="run", help="run folder, such as runs/laptop")
    port = "port on the loopback interface; 0: any free port (default: 6006, or the next free one)"
    parser.add_argument("--port", type=whole("--port", 0, LARGEST_PORT), metavar="N", help=port)


def run(options: argparse.Namespace) -> int:
    """Become TensorBoard, which prints its address and runs until it is ended. ConfigError if a run has no curves."""
    command = board_command(options.runs, options.port)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - no shell; the process keeps its id


def board_command(runs: Sequence[Path], port: int | None) -> list[str]:
    """Return the arguments with which Python starts TensorBoard, which changes nothing, on the runs."""
    for path in runs:
        require_run(path)
        if not RunFolder(path).tensorboard.is_dir():
            raise ConfigError(
                f"{path} has no curves for TensorBoard: it has finished no step yet, or train.sinks of its recipe has "
                "no tensorboard; `keepstep report` shows every run"
            )
    ports = [] if port is None else ["--port", str(port)]
    return ["-m", "tensorboard.main", *_folders(runs), "--host", "127.0.0.1", *ports]


def _folders(runs: Sequence[Path]) -> list[str]:
    if len(runs) == 1:
        return ["--logdir", str(RunFolder(runs[0]).tensorboard)]
    names = [path.resolve().name for path in runs]
    if len(set(names)) < len(names):
        names = [str(path) for path in runs]
    if bad := [str(path) for path in runs if set(SEPARATORS) & set(str(path.resolve()))]:
        raise ConfigError(
            f"{bad[0]} has a comma or a colon in its path, which separate runs for TensorBoard; show it alone, or "
            "rename its folder"
        )
    pairs = zip(names, runs, strict=True)
    return ["--logdir_spec", ",".join(f"{name}:{RunFolder(path).tensorboard}" for name, path in pairs)]
