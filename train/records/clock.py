"""Accounts for every second of a rank's life by what it was spent on.

The loop reports each phase that it enters. The seconds until the next report count toward that phase. Only the
monotonic clock is read, so a jump of the wall clock changes nothing.
"""

import time
from collections.abc import Callable, Mapping

KINDS = {
    "start": "start",
    "compile": "compile",
    "data": "data_wait",
    "forward": "step",
    "update": "step",
    "evaluate": "evaluation",
    "save": "checkpoint_stall",
    "profile": "profile",
}
"""Phase of the loop -> kind of time that its seconds are counted as."""


PROCESS_STARTED = time.monotonic()
"""Approximate start of the process: `train.__main__` imports this file first."""


def uptime() -> float:
    """Return the seconds since this process started."""
    return time.monotonic() - PROCESS_STARTED


class Clock:
    """Seconds spent so far, by kind. Starts in the phase `start`, of which `already` seconds have passed."""

    def __init__(self, already: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = now() - already
        self._kind = KINDS["start"]
        self._totals: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        """Start to count toward a phase, one of KINDS."""
        now = self._now()
        self._totals = self._totals_at(now)
        self._since, self._kind = now, KINDS[phase]

    def totals(self) -> dict[str, float]:
        """Return the seconds since the start by kind, the present phase included."""
        return self._totals_at(self._now())

    def _totals_at(self, now: float) -> dict[str, float]:
        return {**self._totals, self._kind: self._totals.get(self._kind, 0.0) + now - self._since}


class Lap:
    """Reads a clock in laps. Several laps may read one clock; each sees every second exactly once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._before: Mapping[str, float] = {}

    def take(self) -> dict[str, float]:
        """Return the seconds by kind since the last `take`, or since the start of the clock."""
        totals = self._clock.totals()
        spent = {kind: round(seconds - self._before.get(kind, 0.0), 6) for kind, seconds in totals.items()}
        self._before = totals
        return {kind: seconds for kind, seconds in spent.items() if seconds}
