"""Requests to stop: signals, and a STOP file in the run folder.

The handler of a training process does nothing but set a flag. The run reads the flag at points where all ranks can
agree on it, so that they leave on the same step. A process that works alone may give up its work at any moment.
Imports no torch: handlers must stand before the slow imports begin.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from train.errors import StoppedError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class StopRequest:
    """True once this process was asked to stop."""

    def __init__(self, file: Path | None = None) -> None:
        self.reason: str | None = None
        self.file = file

    def install(self) -> None:
        """Handle the signals. A second one changes nothing; only SIGKILL ends a process that is saving."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name

    def __bool__(self) -> bool:
        if self.reason is None and self.file is not None and self.file.exists():
            self.reason = f"{self.file.name} file"
        return self.reason is not None


@contextmanager
def abort_on_signals(work: str) -> Iterator[None]:
    """The first signal raises StoppedError wherever the block stands; later ones leave it time to clear up."""
    stop = StopRequest()

    def give_up(number: int, frame: FrameType | None) -> None:
        asked = bool(stop)
        stop._on_signal(number, frame)
        if not asked:
            raise StoppedError(f"{work} was stopped ({stop.reason}); nothing half-written is left")

    before = {number: signal.signal(number, give_up) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
