"""Copies a checkpoint between file systems and object stores and verifies each block on the way. No torch."""

from dataclasses import replace

from train.checkpoint.format.manifest import encode
from train.checkpoint.format.verify import read_attachment, read_file, read_manifest
from train.checkpoint.stores.protocol import Folder, Root
from train.errors import CheckpointError


def copy(source: Folder, root: Root) -> Folder:
    """Copy a checkpoint into a store, where it appears only when it is complete; returns the copy.

    DamagedError if the source is damaged; CheckpointError if the store already has a checkpoint of this step."""
    manifest, _ = read_manifest(source)
    if manifest.step in root.steps():
        raise CheckpointError(f"{root.folder(manifest.step)} already exists; remove it, or copy to another folder")
    root.sweep()  # what a killed copy left behind
    attempt = root.begin(manifest.step)
    try:
        names = {file.name: root.prefix(attempt) + file.name.rsplit("/", 1)[-1] for file in manifest.files}
        target = root.attempt_folder(attempt)
        for file in manifest.files:
            target.write(names[file.name], read_file(source, manifest, file))
        files = [replace(file, name=names[file.name]) for file in manifest.files]
        pieces = {
            tensor: [replace(piece, file=names[piece.file]) for piece in pieces]
            for tensor, pieces in manifest.pieces.items()
        }
        attachments = [attachment.renamed(root.prefix(attempt)) for attachment in manifest.attachments]
        for old, new in zip(manifest.attachments, attachments, strict=True):
            target.write(new.name, [read_attachment(source, old)])
        copied = replace(manifest, files=files, pieces=pieces, attachments=attachments)
        root.commit(attempt, manifest.step, encode(copied))
    except BaseException:
        root.abandon(attempt)
        raise
    return root.folder(manifest.step)
