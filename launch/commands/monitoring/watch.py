"""`keepstep watch`: a live view of runs in the terminal, also over ssh. Only reads files."""

import argparse
import os
import select
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.inspect.run_status import require_run
from launch.numbers import number
from train.errors import ConfigError

WIDTH = 100
"""Columns of a frame that is not shown on a terminal."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep watch`."""
    parser.epilog = "example: keepstep watch runs/laptop\n\nq or Ctrl-C ends the view; the run goes on."
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, such as runs/laptop")
    parser.add_argument("--metric", default="loss", help="value that is drawn, such as grad_norm (default: loss)")
    parser.add_argument(
        "--every", type=number("--every", 0.2, 3600), default=2.0, help="seconds between two frames (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")


def run(options: argparse.Namespace) -> int:
    """Show the runs until a key ends the view. ConfigError if the output is no terminal."""
    for path in options.runs:
        require_run(path)
    if not options.once and not sys.stdout.isatty():
        names = " ".join(map(str, options.runs))
        raise ConfigError(f"the output is not a terminal; `keepstep status {names}` prints the state once")
    from rich.console import Console

    from launch.watch.frame import frame
    from launch.watch.snapshot import Watched

    watched = [Watched(path) for path in options.runs]
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if options.once:
        console.print(frame([one.read() for one in watched], options.metric, console.width))
        return 0
    from rich.live import Live

    with suppress(KeyboardInterrupt), _keys() as quit_within:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            live.update(frame([one.read() for one in watched], options.metric, console.width), refresh=True)
            while not quit_within(options.every):
                live.update(frame([one.read() for one in watched], options.metric, console.width), refresh=True)
    return 0


@contextmanager
def _keys() -> Generator[Callable[[float], bool]]:
    """Yield a function that waits some seconds and returns whether a key ended the view: q, Esc, or a lost terminal."""
    if not sys.stdin.isatty():
        yield _wait
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _q_within
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _q_within(seconds: float) -> bool:
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return False
    return os.read(sys.stdin.fileno(), 64).lower() in (b"", b"q", b"\x1b")
