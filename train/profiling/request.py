"""The request for a profile that `keepstep profile` leaves in a run folder."""

import contextlib
import logging
from pathlib import Path

from data_pipeline.atomic_file import write_atomic
from data_pipeline.untrusted import read_file
from train.profiling.config import MOST_STEPS

log = logging.getLogger(__name__)


class ProfileRequest:
    """The file in the run folder: the number of steps as text. Only rank 0 looks for it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_foreign = False

    def leave(self, steps: int) -> None:
        """Ask for a profile of so many steps, from any machine that sees the run folder."""
        write_atomic(self._file, str(steps).encode())

    def steps(self) -> int:
        """Return the number of steps that are asked for; 0 without a request. A foreign file is removed."""
        if self._is_foreign or not self._file.exists():
            return 0
        try:
            steps = int(read_file(self._file, limit=32))
            if 1 <= steps <= MOST_STEPS:
                return steps
        except (OSError, ValueError):
            pass
        log.warning("%s does not hold a number from 1 to %d; it is removed", self._file, MOST_STEPS)
        self.remove()
        self._is_foreign = self._file.exists()  # such as a folder
        return 0

    def remove(self) -> None:
        """Remove the request: it is met, or nobody can meet it."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)
