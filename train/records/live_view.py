"""The progress of a run on a terminal: a bar with rate and time left, and the newest values, below the log.

rich lays the view out; this file puts it on the screen. The cursor always rests at the view's first character, so that
whatever is printed next, by any process, begins there, and nothing has to know how many lines are drawn. Log messages
erase the view first; the next step draws it again. No error of the output, and none of the view, ends the run.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.health.safe_output import erase_view

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

log = logging.getLogger(__name__)

DRAW_SECONDS = 0.25
"""Least seconds between two drawings: a short step must not wait for the terminal."""
SHOWN = (
    ("loss", "loss", ".4f"),
    ("lr", "lr", ".2e"),
    ("grad_norm", "grad norm", ".3f"),
    ("tokens_per_second", "tokens/s", ",.0f"),
    ("mfu", "MFU", ".1%"),
    ("share_of_measured_peak", "of measured peak", ".0%"),
    ("memory_gib", "GiB", ".2f"),
)
"""Values of a record that are shown: name, words and format. Without MFU, the share of the measured peak is."""


class LiveView:
    """The view on standard error. Draws nothing if that is not a terminal."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._console: Console | None = None
        self._spent: dict[str, float] = {}
        self._drawn = -DRAW_SECONDS
        self._enabled = sys.stderr.isatty()

    def show(self, step: int, record: Mapping[str, Any], step_seconds: float) -> None:
        """Draw the view after a step. `step_seconds`: the usual time of a step now."""
        if not self._enabled:
            return
        for kind, seconds in record["seconds"].items():
            self._spent[kind] = self._spent.get(kind, 0.0) + seconds
        now = time.monotonic()
        if now - self._drawn < DRAW_SECONDS and step < self._total_steps:
            return
        self._drawn = now
        try:
            self._draw(step, record, step_seconds)
        except Exception as error:  # also what rich raises for a strange terminal
            self.close()
            log.warning("the live view is switched off: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Erase the view; it is not drawn again."""
        if self._enabled:
            self._enabled = False
            with contextlib.suppress(OSError):
                erase_view()

    def _draw(self, step: int, record: Mapping[str, Any], step_seconds: float) -> None:
        if self._console is None:
            self._console = self._opened()
        with self._console.capture() as captured:
            self._console.print(self._layout(step, record, step_seconds))
        lines = captured.get().rstrip("\n")
        up = lines.count("\n")
        print(f"\r\x1b[J{lines}\r" + (f"\x1b[{up}A" if up else ""), end="", file=sys.stderr, flush=True)

    def _opened(self) -> "Console":
        from rich.console import Console

        for handler in logging.getLogger().handlers:
            handler.addFilter(self._before_message)
        return Console(file=sys.stderr, highlight=False)

    def _before_message(self, _: logging.LogRecord) -> bool:
        if self._enabled:
            erase_view()
        return True

    def _layout(self, step: int, record: Mapping[str, Any], step_seconds: float) -> "RenderableType":
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        assert self._console is not None
        progress = f"  step {step:,} of {self._total_steps:,} ({step / self._total_steps:.0%})"
        left = time_left((self._total_steps - step) * step_seconds)
        pace = f"  {1 / step_seconds:,.3g} steps/s, {left} left" if step_seconds else ""
        bar = Table.grid()
        width = max(10, self._console.width - len(progress + pace) - 1)
        bar.add_row(ProgressBar(self._total_steps, step, width=width), Text(progress + pace))
        return Group(bar, Text("  ".join([*_values(record), f"goodput {self._goodput:.0%}"])))

    @property
    def _goodput(self) -> float:
        """Share of this attempt's seconds in which steps were computed."""
        return self._spent.get("step", 0.0) / (sum(self._spent.values()) or 1.0)


def _values(record: Mapping[str, Any]) -> list[str]:
    hidden = "share_of_measured_peak" if "mfu" in record else ""
    return [f"{words} {record[name]:{form}}" for name, words, form in SHOWN if name in record and name != hidden]


def time_left(seconds: float) -> str:
    """Return seconds as `HH:MM:SS`, with the days before it from a day on, such as `2 d 03:04:05`."""
    days, rest = divmod(round(seconds), 86_400)
    clock = time.strftime("%H:%M:%S", time.gmtime(rest))
    return f"{days} d {clock}" if days else clock
