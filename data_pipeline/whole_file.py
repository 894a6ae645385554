"""Files that are there whole or not at all."""

import os
import secrets
from pathlib import Path


def passing_name(path: Path) -> Path:
    """A name beside it that no other process uses, on any machine."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")


def write_whole(path: Path, data: bytes) -> None:
    """The file appears under its name only when it is whole and on disk."""
    passing = passing_name(path)
    try:
        with passing.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        passing.replace(path)
    except BaseException:
        passing.unlink(missing_ok=True)
        raise
