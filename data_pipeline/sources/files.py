"""Input files, and the parts of them that tasks read."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from fsspec.core import url_to_fs

from data_pipeline.credentials import with_credentials
from data_pipeline.errors import DataError
from data_pipeline.untrusted import check_file, open_file

_VERSION_KEYS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)
"""Entries of fsspec's file information that change with the content, the best first."""


@dataclass(frozen=True)
class InputFile:
    """A file of text, or a shard of a Hugging Face data set."""

    address: str
    size: int | None
    """Size in bytes as stored; None if unknown."""
    version: str = ""
    """Changes when the content does: time of the last change, or ETag. Empty if the storage states neither."""


@dataclass(frozen=True)
class Part:
    """The records of one file that begin in bytes [start, end), or in row groups [start, end) of parquet."""

    file: int
    """Number of the file in the list of inputs."""
    start: int = 0
    end: int | None = None
    """None: the end of the file."""

    @property
    def is_whole_file(self) -> bool:
        """Whether the part is the entire file."""
        return self.start == 0 and self.end is None


def is_remote(address: str) -> bool:
    """Whether fsspec reads the address. All other addresses are local paths, whatever characters they contain."""
    return "://" in address


def local_file(path: Path) -> InputFile:
    """The file at a local path, with its present size and time of change in nanoseconds.

    NotAFileError, an OSError, for a FIFO, a socket, a device or a folder."""
    found = check_file(path)
    return InputFile(str(path), found.st_size, str(found.st_mtime_ns))


def remote_file(address: str, info: dict[str, Any]) -> InputFile:
    """The file at an address, of which fsspec states `info`."""
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None), "")
    return InputFile(address, info.get("size"), version)


def open_input(address: str) -> BinaryIO:
    """Opens a local path or an fsspec address for reading. DataError if that fails."""
    try:
        if not is_remote(address):
            return os.fdopen(open_file(Path(address)), "rb")
        return fsspec.open(with_credentials(address), "rb").open()  # type: ignore[return-value]
    except Exception as error:  # object-store libraries raise many types
        raise DataError(f"cannot read {address}: {error}") from error


def check_unchanged(file: InputFile) -> None:
    """DataError if the file is no longer the one that was listed when the build began."""
    if not file.version or file.size is None:  # a Hugging Face data set, or a storage that states no version
        return
    try:
        if is_remote(file.address):
            system, path = url_to_fs(with_credentials(file.address))
            system.invalidate_cache()
            now = remote_file(file.address, system.info(path))
        else:
            now = local_file(Path(file.address))
    except Exception as error:  # as above
        raise DataError(f"cannot read {file.address}: {error}") from error
    if now != file:
        raise DataError(
            f"{file.address} changed while the build was reading it; delete the build's .work folder and build again "
            f"once no other program writes the inputs"
        )
