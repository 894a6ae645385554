"""Requests to stop: signals, and a STOP file in the run folder.

In a training process the signal handler only sets a flag. The run reads the flag at points where all ranks can agree on
it, so that they stop at the same step. A process that works alone may abandon its work at any moment. This file does
not import torch, because the handlers must be installed before the slow imports begin.
"""

import os
import signal
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from train.errors import StoppedError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
NOHUP = "KEEPSTEP_NOHUP"
"""Variable by which the launcher tells its ranks whether it was started with SIGHUP ignored (1) or not (0)."""


def ignores_hangup(env: Mapping[str, str]) -> bool:
    """Return whether the run goes on when its terminal is closed, because `nohup` started it.

    Ranks ask `env`: their launcher makes them ignore all stop signals while they start."""
    if NOHUP in env:
        return env[NOHUP] == "1"
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop: SIGNALS, without SIGHUP under `nohup`."""
    hangup_ignored = ignores_hangup(os.environ)
    return tuple(number for number in SIGNALS if not (hangup_ignored and number == signal.SIGHUP))


class StopRequest:
    """True once this process has been asked to stop; `reason` names the signal or the file."""

    def __init__(self, file: Path | None = None) -> None:
        self.reason: str | None = None
        self.file = file

    def install(self) -> None:
        """Install the signal handlers. Further signals change nothing, so only SIGKILL ends a process that saves."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name

    def __bool__(self) -> bool:
        if self.reason is None and self.file is not None and self.file.exists():
            self.reason = f"{self.file.name} file"
        return self.reason is not None


@contextmanager
def abort_on_signals(work: str) -> Generator[None]:
    """Raise StoppedError inside the block at the first signal. Later signals are ignored, so that it can clean up.

    `work` names the block in the error, such as "the export"."""
    stop = StopRequest()

    def abort(number: int, frame: FrameType | None) -> None:
        already_stopping = bool(stop)
        stop._on_signal(number, frame)  # pyright: ignore[reportPrivateUsage]
        if not already_stopping:
            raise StoppedError(f"{work} was stopped ({stop.reason}); nothing half-written is left")

    previous = {number: signal.signal(number, abort) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
