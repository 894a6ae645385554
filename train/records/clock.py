"""Books every second of a rank's life to what it was spent on.

The loop tells which phase it enters; the seconds since the last such call belong to the phase before. Only the
monotonic clock is read, so a wall clock that jumps changes nothing.
"""

import time
from collections.abc import Callable

KINDS = {
    "start": "start",
    "compile": "compile",
    "data": "data_wait",
    "forward": "step",
    "update": "step",
    "evaluate": "evaluation",
    "save": "checkpoint_stall",
}
"""Phase of the loop: kind of time that it is booked to."""


PROCESS_STARTED = time.monotonic()
"""Nearly: `train.__main__` imports this file first."""


def uptime() -> float:
    """Seconds since this process began."""
    return time.monotonic() - PROCESS_STARTED


class Clock:
    """Starts in the phase `start`, of which `already` seconds have passed."""

    def __init__(self, already: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = now() - already
        self._kind = KINDS["start"]
        self._booked: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        now = self._now()
        self._booked[self._kind] = self._booked.get(self._kind, 0.0) + now - self._since
        self._since, self._kind = now, KINDS[phase]

    def take(self) -> dict[str, float]:
        """Seconds by kind since the last `take`, those of the present phase included."""
        now = self._now()
        booked, self._booked = self._booked, {}
        booked[self._kind] = booked.get(self._kind, 0.0) + now - self._since
        self._since = now
        return {kind: round(seconds, 6) for kind, seconds in booked.items()}
