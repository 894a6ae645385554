"""Copies a checkpoint between file systems and object stores, each block checked on the way. No torch."""

from dataclasses import replace

from train.checkpoint.format.manifest import encode
from train.checkpoint.format.verify import read_file, read_manifest
from train.checkpoint.stores.protocol import Folder, Root
from train.errors import CheckpointError


def copy(source: Folder, root: Root) -> Folder:
    """Into a folder of checkpoints, where it appears all at once. The copy.

    DamagedError if the source is damaged, CheckpointError if there is one of its step already."""
    manifest, _ = read_manifest(source)
    if manifest.step in root.steps():
        raise CheckpointError(f"{root.folder(manifest.step)} is there already; remove it, or copy to another folder")
    place = root.begin(manifest.step)
    try:
        names = {file.name: root.prefix(place) + file.name.rsplit("/", 1)[-1] for file in manifest.files}
        target = root.attempt(place)
        for file in manifest.files:
            target.write(names[file.name], read_file(source, manifest, file))
        files = [replace(file, name=names[file.name]) for file in manifest.files]
        pieces = {
            tensor: [replace(piece, file=names[piece.file]) for piece in pieces]
            for tensor, pieces in manifest.pieces.items()
        }
        root.commit(place, manifest.step, encode(replace(manifest, files=files, pieces=pieces)))
    except BaseException:
        root.abandon(place)
        raise
    return root.folder(manifest.step)
