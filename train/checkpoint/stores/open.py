"""Opens a place that holds checkpoints, given its path or URL."""

from pathlib import Path

from train.checkpoint.stores.local import LocalFolder, LocalRoot
from train.checkpoint.stores.protocol import Folder, Root


def open_root(place: Path | str) -> Root:
    if isinstance(place, str) and "://" in place:
        from train.checkpoint.stores.object_store import ObjectRoot

        return ObjectRoot(place)
    return LocalRoot(Path(place))


def open_folder(place: Path | str) -> Folder:
    """One checkpoint, by its own path or URL."""
    if isinstance(place, str) and "://" in place:
        from train.checkpoint.stores.object_store import ObjectFolder

        return ObjectFolder(place)
    return LocalFolder(Path(place))
