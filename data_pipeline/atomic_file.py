"""Files that appear under their name only when they are complete."""

import os
import secrets
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO


def _partial_path(path: Path) -> Path:
    """A name beside `path` that no other process uses, on any machine."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")


@contextmanager
def open_atomic(path: Path) -> Generator[BinaryIO]:
    """Opens a file for writing. It gets its name when the block ends without an error, after it is on disk."""
    partial = _partial_path(path)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_together(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files of a folder, which is made if it is missing. On an error none of them appears."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as stack:
            for name, data in files.items():
                opened = stack.enter_context(open_atomic(folder / name))
                opened.write(data)
                opened.flush()
                os.fsync(opened.fileno())
    except BaseException:
        if made:
            folder.rmdir()
        raise


def write_atomic(path: Path, data: bytes) -> None:
    """Writes `data` to `path`. The file gets its name only after all of it is on disk."""
    with open_atomic(path) as file:
        file.write(data)
