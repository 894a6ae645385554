"""What commands show to people: tables and progress bars. Rich on a terminal, plain text when piped."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 10_000
"""Characters of a line when output is not a terminal: lines are never wrapped."""
PLAIN_SECONDS = 10.0
"""Seconds between progress lines when output is not a terminal."""

Advance = Callable[[float], None]
"""Reports that so many more units are done."""


def console(file: TextIO | None = None) -> "Console":
    """A console on `file` (default: standard output) that neither wraps nor colours what is piped."""
    from rich.console import Console

    target = sys.stdout if file is None else file
    return Console(file=target, width=None if target.isatty() else PLAIN_WIDTH, highlight=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print rows under column names. A name that begins with ">" heads a column that is aligned to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    box = SIMPLE_HEAD if sys.stdout.isatty() else None
    table = Table(title=title or None, title_justify="left", box=box, pad_edge=box is not None)
    for name in columns:
        justify = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # text, so that brackets are not read as markup
    console().print(table)


def print_facts(facts: Sequence[tuple[str, str]], indent: int = 2) -> None:
    """Print names and values, one pair a line, the values aligned."""
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        print(f"{' ' * indent}{name:<{width}}  {value}".rstrip())


@contextmanager
def progress(description: str, total: float | None, unit: str = "") -> Iterator[Advance]:
    """Show how far a piece of work is, with its rate and the time left, on standard error.

    On a terminal this is a bar; otherwise a whole line every PLAIN_SECONDS. `unit` is "bytes", or a noun such as
    "files". `total` None: unknown. Yields a function that takes the units done since its last call."""
    with (_bar if sys.stderr.isatty() else _lines)(description, total, unit) as advance:
        yield advance


@contextmanager
def _bar(description: str, total: float | None, unit: str) -> Iterator[Advance]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    in_bytes = unit == "bytes"
    amounts = [DownloadColumn(), TransferSpeedColumn()] if in_bytes else [MofNCompleteColumn(), TextColumn(unit)]
    columns = [TextColumn("{task.description}"), BarColumn(), *amounts, TimeRemainingColumn()]
    with Progress(*columns, console=console(sys.stderr), transient=True) as shown:
        task = shown.add_task(description, total=total)
        yield lambda amount: shown.advance(task, amount)


@contextmanager
def _lines(description: str, total: float | None, unit: str) -> Iterator[Advance]:
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
    """One line: the share done, the rate, and the time left at that rate."""
    rate = done / max(seconds, 1e-9)
    parts = [amount(done, unit) + (f" of {amount(total, unit)} ({done / total:.0%})" if total else "")]
    parts.append(f"{amount(rate, unit)}/s")
    if total and done:
        parts.append(f"{duration((total - done) / rate)} left")
    return f"{description}: {', '.join(parts)}"


def amount(value: float, unit: str) -> str:
    """A number with its unit: bytes in kB, MB, GB or TB (powers of 1000), anything else as a count."""
    if unit == "bytes":
        return size(value)
    return f"{value:,.0f} {unit}".rstrip()


def size(count: float) -> str:
    """Bytes in the largest unit that keeps the number at 1 or above: `1.5 GB` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """Seconds as people say them: `45 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    whole = round(seconds)
    for large, small, names in ((86400, 3600, ("d", "h")), (3600, 60, ("h", "min")), (60, 1, ("min", "s"))):
        if whole >= large:
            return f"{whole // large} {names[0]} {whole % large // small} {names[1]}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
