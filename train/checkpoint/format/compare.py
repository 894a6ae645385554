"""Compares two checkpoints, fact by fact and tensor by tensor. No torch."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from train.checkpoint.format.manifest import Manifest, Piece, flat
from train.checkpoint.format.reader import Reader
from train.checkpoint.format.verify import read_manifest
from train.checkpoint.stores.local import LocalFolder

_FACTS = ("step", "tokens", "validation_loss", "extra", "identity", "layout", "versions")
_RECIPE_HASH = "extra.recipe_xxh3"
"""Not compared: it depends on how the recipe was written, and only what the run computed counts."""


def differences(first: Path, second: Path) -> Iterator[str]:
    """One line for each fact and each tensor that differs. Tensors are compared bit by bit."""
    one, two = read_manifest(LocalFolder(first))[0], read_manifest(LocalFolder(second))[0]
    yield from _fact_differences(one, two)
    yield from _attachment_differences(one, two)
    yield from (f"{name}: only in {first}" for name in sorted(one.state_names - two.state_names))
    yield from (f"{name}: only in {second}" for name in sorted(two.state_names - one.state_names))
    readers = Reader(first), Reader(second)
    for name in sorted(one.state_names & two.state_names):
        a, b = one.pieces[name], two.pieces[name]
        if (a[0].dtype, a[0].shape) != (b[0].dtype, b[0].shape):
            yield f"{name}: {a[0].dtype} {a[0].shape} and {b[0].dtype} {b[0].shape}"
        elif _contents(a) != _contents(b) and (line := _value_differences(readers[0][name], readers[1][name])):
            yield f"{name}: {line}"


def _fact_differences(one: Manifest, two: Manifest) -> Iterator[str]:
    a = flat({name: getattr(one, name) for name in _FACTS})
    b = flat({name: getattr(two, name) for name in _FACTS})
    for name in sorted((a.keys() | b.keys()) - {_RECIPE_HASH}):
        if a.get(name) != b.get(name):
            yield f"{name}: {a.get(name)!r} and {b.get(name)!r}"


def _attachment_differences(one: Manifest, two: Manifest) -> Iterator[str]:
    """Attachments whose content differs. An earlier version, whose checkpoint has none, cannot be compared."""
    a, b = ({x.plain_name: x.checksum for x in manifest.attachments} for manifest in (one, two))
    for name in sorted(a.keys() | b.keys()) if a and b else ():
        if a.get(name) != b.get(name):
            yield f"tokenizer/{name}: xxh3 {a.get(name)} and {b.get(name)}"


def _contents(pieces: list[Piece]) -> list[tuple[object, ...]]:
    """Boxes and checksums of the pieces. If they are equal, so are the tensors, and no file need be read."""
    return [(piece.offsets, piece.sizes, piece.checksums) for piece in pieces]


def _value_differences(one: np.ndarray, two: np.ndarray) -> str:
    if one.tobytes() == two.tobytes():
        return ""
    apart = np.abs(one.astype(np.float64) - two.astype(np.float64))
    return f"{np.count_nonzero(one != two)} of {one.size} elements differ, by {np.nanmax(apart):.3g} at most"
