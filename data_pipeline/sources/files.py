"""Input files, the parts of them that tasks read, and how a file is opened."""

from dataclasses import dataclass
from typing import BinaryIO

import fsspec

from data_pipeline.errors import DataError

HUGGING_FACE = "hf:"


@dataclass(frozen=True)
class InputFile:
    address: str
    size: int | None
    """Bytes as stored; null if unknown."""


@dataclass(frozen=True)
class Part:
    """What a task reads of one file: bytes [start, end) if it can be cut (records that begin there), else all of it."""

    file: int
    start: int = 0
    end: int | None = None


Task = tuple[Part, ...]


def is_address(text: str) -> bool:
    return "://" in text


def open_input(address: str) -> BinaryIO:
    try:
        return fsspec.open(address, "rb").open()  # type: ignore[return-value]
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {address}: {error}") from error
