"""Requests to stop: signals, and a STOP file in the run folder.

A handler does nothing but set a flag. The loop reads the flag at points where all ranks can agree on it, so that they
leave on the same step. Imports no torch: handlers must stand before the slow imports begin.
"""

import signal
from pathlib import Path
from types import FrameType

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
