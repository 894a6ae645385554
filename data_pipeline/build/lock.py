"""The lock of a build, so that two builds never write one output at once."""

import fcntl
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from data_pipeline.build.folder import work_folder
from data_pipeline.errors import DataError
from data_pipeline.file_lock import lock_holder, open_lock

log = logging.getLogger(__name__)

LOCK = "lock"
"""File in the work folder."""


@contextmanager
def build_lock(out: Path, *, shared: bool = False) -> Generator[None]:
    """Holds the lock of the build of `out`, and makes its work folder.

    The jobs of an array hold it together (`shared`). DataError if another build holds it."""
    path = work_folder(out) / LOCK
    held = False
    while not held:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = open_lock(path)
        except FileNotFoundError:  # a build that has just finished deleted the folder
            continue
        try:
            _lock(descriptor, out, shared)
            held = path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))
            if held:
                yield
        finally:
            os.close(descriptor)


def _lock(descriptor: int, out: Path, shared: bool) -> None:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(
            f"another build of {out} is running; wait until it ends, or choose another --out (only the parts of a "
            f"--share run at the same time); {lock_holder(descriptor)} holds its lock"
        ) from None
    except OSError as error:
        log.warning("no file locks for %s (%s); do not start two builds of it at once", out, error)
