"""Says in one line that a command cannot write its output: a full disk, a read-only folder, a file in the way."""

import errno
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NUMBER = re.compile(r"\(os error (\d+)\)")
"""How the libraries that are written in Rust (safetensors, tokenizers) say the number of a system's error."""


@contextmanager
def output_to(out: Path, after: str) -> Generator[None]:
    """Raise ExhaustedError if the disk is full, ConfigError if the output cannot be written for another reason.

    `after` says what is left of the output, and what the same command does then. Other errors pass."""
    from train.errors import ConfigError, ExhaustedError

    try:
        yield
    except Exception as error:
        if (number := _number_of(error)) is None:
            raise
        filename = getattr(error, "filename", None)
        if number in FULL:
            raise ExhaustedError(
                f"no space is left for {filename or out} ({os.strerror(number)}); free some space or choose another "
                f"--out; {after}"
            ) from error
        if filename is None or not _concerns(Path(os.fsdecode(filename)).absolute(), out.absolute()):
            raise
        raise ConfigError(
            f"{filename} cannot be written ({os.strerror(number)}); make the folder of --out ({out}) writable, or "
            f"choose another --out; {after}"
        ) from error


def _number_of(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = _NUMBER.search(str(error))
    return int(found[1]) if found else None


def _concerns(path: Path, out: Path) -> bool:
    """Return whether a path is the output, beside it (as its work folder is), below it, or a folder above it."""
    return path.is_relative_to(out.parent) or out.is_relative_to(path)
