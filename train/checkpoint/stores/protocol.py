"""Interface of checkpoint stores: `local.py` implements it for file systems, `object_store.py` for object stores.

A save writes to an attempt, a partial checkpoint with a unique name, and commits it when all its shards are durable.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from data_pipeline.untrusted import check_size


class Folder(Protocol):
    """The files of one checkpoint."""

    def size(self, name: str) -> int:
        """Size of a file in bytes. OSError if it does not exist."""
        ...

    def kept_open(self, name: str) -> AbstractContextManager[object]:
        """Keeps a file open for all threads while the context lasts, so that the kernel reads ahead between reads."""
        ...

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on. OSError if the file is too short."""
        ...

    def write(self, name: str, parts: Iterable[memoryview | bytes | bytearray]) -> None:
        """Write a new file from its parts. The file is durable when the call returns."""
        ...


class Root(Protocol):
    """All checkpoints of a run."""

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first."""
        ...

    def folder(self, step: int) -> Folder:
        """The checkpoint of a step."""
        ...

    def begin(self, step: int) -> str:
        """Begin an attempt to save a step; returns the attempt's name. Call on rank 0 only."""
        ...

    def attempt_folder(self, attempt: str) -> Folder:
        """The folder to which an attempt writes its shards."""
        ...

    def prefix(self, attempt: str) -> str:
        """What precedes the names of this attempt's shards in the manifest."""
        ...

    def commit(self, attempt: str, step: int, manifest: bytes | bytearray) -> None:
        """Make an attempt the checkpoint of its step, atomically; it replaces an earlier one. Call on rank 0 only."""
        ...

    def abandon(self, attempt: str) -> None:
        """Remove the files of a failed attempt. Call on rank 0 only; never raises."""
        ...

    def remove(self, step: int) -> None:
        """Delete a checkpoint. Does nothing if it does not exist."""
        ...

    def quarantine(self, step: int) -> str:
        """Rename a damaged checkpoint, so that it is not loaded again; returns its new location."""
        ...

    def quarantined(self) -> list[str]:
        """Locations of all quarantined checkpoints, those of earlier attempts included."""
        ...

    def sweep(self) -> None:
        """Remove what savers that have died left behind. Call on rank 0 only."""
        ...


def read_all(folder: Folder, name: str) -> bytes:
    """The whole content of a file of metadata. OSError if it cannot be read, or if it is too large for metadata."""
    data = bytearray(check_size(name, folder.size(name)))
    folder.read_into(name, 0, memoryview(data))
    return bytes(data)
