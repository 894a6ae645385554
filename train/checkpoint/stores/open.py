"""Opens a store of checkpoints by its path or URL."""

from pathlib import Path

from train.checkpoint.stores.local import LocalFolder, LocalRoot
from train.checkpoint.stores.protocol import Folder, Root


def open_root(location: Path | str) -> Root:
    """All checkpoints at a path or URL (a run's `checkpoints`)."""
    if isinstance(location, str) and "://" in location:
        from train.checkpoint.stores.object_store import ObjectRoot

        return ObjectRoot(location)
    return LocalRoot(Path(location))


def open_folder(location: Path | str) -> Folder:
    """One checkpoint, at its own path or URL (`.../step-00001000`)."""
    if isinstance(location, str) and "://" in location:
        from train.checkpoint.stores.object_store import ObjectFolder

        return ObjectFolder(location)
    return LocalFolder(Path(location))
