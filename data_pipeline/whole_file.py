"""Files that are there whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def passing_name(path: Path) -> Path:
    """A name beside it that no other process uses, on any machine."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")


@contextmanager
def open_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write; it appears under its name when the block has ended well, whole and on disk, else not at all."""
    passing = passing_name(path)
    try:
        with passing.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        passing.replace(path)
    except BaseException:
        passing.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """The file appears under its name only when it is whole and on disk."""
    with open_whole(path) as file:
        file.write(data)
