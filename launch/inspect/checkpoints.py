"""Finds the checkpoints that a path or URL means, and reads them with progress.

The path or URL is one of: a checkpoint (`runs/a/checkpoints/step-00001000`), a run folder, its `checkpoints` folder.
"""

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from launch.terminal import Advance, progress
from train.errors import CheckpointError

if TYPE_CHECKING:
    from train.checkpoint.stores.protocol import Folder, Root


def root_at(path: str) -> "Root":
    """Return the folder of checkpoints: `path` itself, or its `checkpoints` if that has any."""
    from train.checkpoint.stores.open import open_root

    inner = open_root(f"{path.rstrip('/')}/checkpoints")
    return inner if inner.steps() else open_root(path)


def checkpoints_at(path: str) -> list[str]:
    """Return the checkpoint at `path`, or all checkpoints of the run there, oldest first. CheckpointError if none."""
    if _is_checkpoint(path):
        return [path]
    root = root_at(path)
    if not (steps := root.steps()):
        raise CheckpointError(f"{path} is not a checkpoint and has none; name a run folder or a step-N folder")
    return [str(root.folder(step)) for step in steps]


def newest_at(path: str) -> str:
    """Return the checkpoint at `path`, or the newest of the run there. CheckpointError if there is none."""
    return checkpoints_at(path)[-1]


def _is_checkpoint(path: str) -> bool:
    from train.checkpoint.format.manifest import MANIFEST
    from train.checkpoint.stores.open import open_folder

    try:
        open_folder(path).size(MANIFEST)
    except OSError:
        return False
    return True


@contextmanager
def reading(action: str, path: str) -> Generator["Folder"]:
    """Yield the checkpoint at `path`; show the progress of the bytes read from it, under the name of the action."""
    from train.checkpoint.format.manifest import DamagedError
    from train.checkpoint.format.verify import read_manifest
    from train.checkpoint.stores.open import open_folder

    folder = open_folder(path)
    try:
        total: float | None = read_manifest(folder)[0].file_bytes
    except DamagedError:  # the caller reports it
        total = None
    with progress(f"{action} {path.rsplit('/', 1)[-1]}", total, "bytes") as advance:
        yield _CountedFolder(folder, advance)


class _CountedFolder:
    """A checkpoint's folder (`train.checkpoint.stores.protocol.Folder`) that reports the bytes read from it."""

    def __init__(self, folder: "Folder", advance: Advance) -> None:
        self._folder, self._advance = folder, advance

    def __str__(self) -> str:
        return str(self._folder)

    def size(self, name: str) -> int:
        return self._folder.size(name)

    def kept_open(self, name: str) -> AbstractContextManager[object]:
        return self._folder.kept_open(name)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self._folder.read_into(name, start, out)
        self._advance(len(out))

    def write(self, name: str, parts: Iterable[memoryview | bytes | bytearray]) -> None:
        self._folder.write(name, parts)
