"""The interface to a place that holds checkpoints: `local.py` for file systems, `object_store.py` for object stores."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol


class Folder(Protocol):
    """The files of one checkpoint."""

    def size(self, name: str) -> int: ...

    def held(self, name: str) -> AbstractContextManager[object]:
        """The file stays open meanwhile, for all threads, so that the kernel reads ahead from one read to the next."""
        ...

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out`. OSError if the file ends before."""
        ...

    def write(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """Durable when it returns."""
        ...


class Root(Protocol):
    """All checkpoints of a run."""

    def steps(self) -> list[int]:
        """Committed ones, oldest first."""
        ...

    def folder(self, step: int) -> Folder: ...

    def begin(self, step: int) -> str:
        """A fresh place to write to, by name. Rank 0 alone."""
        ...

    def attempt(self, name: str) -> Folder: ...

    def prefix(self, attempt: str) -> str:
        """What stands before the shards' names of this attempt in the manifest."""
        ...

    def commit(self, attempt: str, step: int, manifest: bytes) -> None: ...

    def abandon(self, attempt: str) -> None:
        """Remove what a failed save left. Rank 0 alone; never raises."""
        ...

    def remove(self, step: int) -> None: ...

    def quarantine(self, step: int) -> str:
        """Move a damaged checkpoint out of the way and say where it is now."""
        ...

    def quarantined(self) -> list[str]:
        """The damaged ones that were moved out of the way, now or in earlier runs."""
        ...

    def sweep(self) -> list[str]:
        """Remove the leavings of dead savers; their names. Rank 0 alone."""
        ...


def read_all(folder: Folder, name: str) -> bytes:
    data = bytearray(folder.size(name))
    folder.read_into(name, 0, memoryview(data))
    return bytes(data)
