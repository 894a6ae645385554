"""Output of commands: tables, facts and progress bars for people, JSON for programs.

Tables and bars are drawn by rich on a terminal; piped output is plain text with one row a line.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 10_000
"""Line width in characters when output is not a terminal, so that lines are never wrapped."""
PLAIN_SECONDS = 10.0
"""Seconds between progress lines when output is not a terminal."""

_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Translates control characters, without line break and tabulator."""

Advance = Callable[[float], None]
"""Takes the units done since its last call."""


def add_json_option(parser: "argparse.ArgumentParser | argparse._MutuallyExclusiveGroup") -> None:  # pyright: ignore[reportPrivateUsage]
    """Add `--json`, which every command that prints facts has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def add_average_option(parser: "argparse.ArgumentParser") -> None:
    """Add `--average`, which every command that loads a model has."""
    help = "take the average of the weights, which the run kept with optim.ema_decay"
    parser.add_argument("--average", action="store_true", help=help)


def print_json(document: Any) -> None:
    """Print a value as JSON on one line."""
    print(json.dumps(document), flush=True)


def console(file: TextIO | None = None) -> "Console":
    """Return a rich console on `file` (default: standard output) that neither wraps nor colours piped output."""
    from rich.console import Console

    target = sys.stdout if file is None else file
    return Console(file=target, width=None if target.isatty() else PLAIN_WIDTH, highlight=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print rows under column names. A column whose name begins with ">" is aligned to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    box = SIMPLE_HEAD if sys.stdout.isatty() else None
    table = Table(title=title or None, title_justify="left", box=box, pad_edge=box is not None)
    for name in columns:
        justify = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))  # text, so that brackets are not read as markup
    shown = console()
    with shown.capture() as captured:
        shown.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def print_facts(facts: Sequence[tuple[str, str]], indent: int = 2) -> None:
    """Print names and values, one pair a line, with the values aligned."""
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        print(f"{' ' * indent}{name:<{width}}  {visible(value)}".rstrip())


def visible(text: str) -> str:
    """Return a text that a log or a file gave, without control characters that a terminal would obey."""
    return text.translate(_CONTROLS)


@contextmanager
def progress(description: str, total: float | None, unit: str = "") -> Generator[Advance]:
    """Show the progress of some work on standard error, with its rate and the time left.

    A terminal shows a bar, any other output a line every PLAIN_SECONDS. `unit` is "bytes" or a noun such as "files".
    A `total` of None is unknown. Yields a function that takes the units done since its last call."""
    with (_bar if sys.stderr.isatty() else _lines)(description, total, unit) as advance:
        yield advance


@contextmanager
def _bar(description: str, total: float | None, unit: str) -> Generator[Advance]:
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.table import Column
    from rich.text import Text

    class Amounts(ProgressColumn):
        """The amount done, the total and the rate."""

        def render(self, task: Task) -> Text:
            parts: list[str] = []
            if task.total:
                done = size(task.completed) if unit == "bytes" else f"{task.completed:,.0f}"
                parts.append(f"{done} of {amount(task.total, unit)}")
            elif task.completed:
                parts.append(amount(task.completed, unit))
            if rate := task.finished_speed or task.speed:
                parts.append(f"{size(rate) if unit == 'bytes' else f'{rate:,.0f}'}/s")
            return Text(", ".join(parts))

    columns = [TextColumn("{task.description}"), BarColumn(), Amounts(Column(no_wrap=True)), TimeRemainingColumn()]
    with Progress(*columns, console=console(sys.stderr), transient=True) as shown:
        task = shown.add_task(description, total=total)
        yield lambda amount: shown.advance(task, amount)


@contextmanager
def _lines(description: str, total: float | None, unit: str) -> Generator[Advance]:
    began = last = time.monotonic()
    done = 0.0

    def advance(amount: float) -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if now - last >= PLAIN_SECONDS:
            last = now
            print(progress_line(description, done, total, unit, now - began), file=sys.stderr, flush=True)

    yield advance


def progress_line(description: str, done: float, total: float | None, unit: str, seconds: float) -> str:
    """Return one line with the share done, the rate, and the time left at that rate."""
    rate = done / max(seconds, 1e-9)
    parts = [amount(done, unit) + (f" of {amount(total, unit)} ({done / total:.0%})" if total else "")]
    parts.append(f"{amount(rate, unit)}/s")
    if total and done:
        parts.append(f"{duration((total - done) / rate)} left")
    return f"{description}: {', '.join(parts)}"


def amount(value: float, unit: str) -> str:
    """Return a number with its unit: bytes in kB, MB, GB or TB (powers of 1000), anything else as a count."""
    if unit == "bytes":
        return size(value)
    return f"{value:,.0f} {unit}".rstrip()


def size(count: float) -> str:
    """Return bytes in the largest unit that keeps the number at 1 or above, such as `1.5 GB` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # 999.6 would be shown as 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """Return seconds as people say them: `48 ms`, `45 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    if abs(seconds) < 0.1:
        return f"{1e3 * seconds:.0f} ms" if seconds else "0 s"
    whole = round(seconds)
    for large, small, names in ((86400, 3600, ("d", "h")), (3600, 60, ("h", "min")), (60, 1, ("min", "s"))):
        if whole >= large:
            return f"{whole // large} {names[0]} {whole % large // small} {names[1]}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"


def local_time(moment: float) -> str:
    """Return seconds since the epoch as local date and time, such as `2026-03-01 14:05:09`."""
    return datetime.fromtimestamp(moment).isoformat(" ", "seconds")
