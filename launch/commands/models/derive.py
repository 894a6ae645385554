"""The actions of `keepstep checkpoint` that make something new of checkpoints: `average` and `convert`."""

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from launch.inspect.checkpoints import newest_at, root_at
from launch.numbers import number, whole
from launch.terminal import print_json, progress
from train.checkpoint.conversion.kinds import KINDS
from train.errors import CheckpointError, ConfigError
from train.health.stop import abort_on_signals


def configure_average(action: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep checkpoint average`."""
    action.add_argument("path", help="run folder or its checkpoints folder, or the URL of one of these")
    action.add_argument("target", metavar="run", help="new run folder that receives the average, or its URL")
    action.add_argument("--steps", metavar="A,B,C", help="steps of the checkpoints")
    action.add_argument("--last", type=whole("--last", 2), metavar="N", help="the newest N checkpoints")
    action.add_argument(
        "--decay",
        type=number("--decay", 0.001, 1),
        default=1.0,
        metavar="D",
        help="each checkpoint counts D times the next newer one (default: 1, all count the same)",
    )


def average(options: argparse.Namespace) -> int:
    """Average the weights of checkpoints and print where the average is."""
    from train.checkpoint.conversion.average import average as save_average

    if (options.steps is None) == (options.last is None):
        raise ConfigError("give one of --steps A,B,C and --last N")
    root = root_at(options.path)
    if not (there := root.steps()):
        raise CheckpointError(f"{options.path} has no checkpoints; name a run folder, such as runs/laptop")
    if options.last is not None and options.last > len(there):
        raise ConfigError(f"--last ({options.last}) is more than the {len(there)} checkpoints of {options.path}")
    steps = _steps(options.steps) if options.last is None else there[-options.last :]
    with abort_on_signals("the average"), _writing_to(options.target):
        with progress(f"averaging {options.path}", None):
            made = save_average(root, steps, options.decay, options.target)
    if options.json:
        print_json({"path": made.path, "steps": made.steps, "shares": made.shares})
    else:
        print(made.path)
    return 0


@contextmanager
def _writing_to(target: str) -> Generator[None]:
    """Raise CheckpointError if the target cannot be written. What was written of it is removed by then."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {target}: {error}; nothing was left there; correct the target"
        ) from error


def _steps(text: str) -> list[int]:
    try:
        steps = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--steps ({text}) must be steps with commas between them, such as 100,200") from None
    if len(steps) < 2 or len(set(steps)) < len(steps):
        raise ConfigError(f"--steps ({text}) must have at least two steps, each once")
    return steps


def configure_convert(action: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep checkpoint convert`."""
    action.add_argument("path", help="a checkpoint, or a run folder, whose newest is taken, or the URL of one")
    action.add_argument("out", type=Path, help="new folder for the converted checkpoint")
    kinds = "; ".join(f"{name}: {summary}" for name, summary in KINDS.items())
    action.add_argument("--to", choices=sorted(KINDS), required=True, help=kinds)


def convert(options: argparse.Namespace) -> int:
    """Convert a checkpoint and print where the result is."""
    from train.checkpoint.conversion.convert import convert as write
    from train.checkpoint.stores.open import open_folder

    path = newest_at(options.path)
    with abort_on_signals("the conversion"), _writing_to(str(options.out)):
        with progress(f"converting {path}", None):
            made = write(open_folder(path), options.to, options.out)
    if options.json:
        print_json({"path": str(options.out), "source": path, "tensors": made.tensors, "left_out": made.left_out})
        return 0
    print(options.out)
    if made.left_out:
        print(f"left out: {', '.join(made.left_out)}")
    return 0
