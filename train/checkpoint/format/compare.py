"""Says in which facts and tensors two checkpoints differ. No torch."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from train.checkpoint.format.manifest import Manifest, Piece, flat
from train.checkpoint.format.reader import Reader
from train.checkpoint.format.verify import read_manifest
from train.checkpoint.stores.local import LocalFolder

_FACTS = ("step", "tokens", "validation_loss", "extra", "identity", "layout", "versions")
_ASKED_FOR = "extra.recipe_xxh3"
"""The hash of the recipe says how a run was asked for; what came of it is what is compared."""


def differences(first: Path, second: Path) -> Iterator[str]:
    """One line for each fact and each tensor that differs; tensors are compared bit by bit."""
    one, two = read_manifest(LocalFolder(first))[0], read_manifest(LocalFolder(second))[0]
    yield from _facts(one, two)
    yield from (f"{name}: only in {first}" for name in sorted(one.state_names - two.state_names))
    yield from (f"{name}: only in {second}" for name in sorted(two.state_names - one.state_names))
    readers = Reader(first), Reader(second)
    for name in sorted(one.state_names & two.state_names):
        mine, other = one.pieces[name], two.pieces[name]
        if (mine[0].dtype, mine[0].shape) != (other[0].dtype, other[0].shape):
            yield f"{name}: {mine[0].dtype} {mine[0].shape} and {other[0].dtype} {other[0].shape}"
        elif _contents(mine) != _contents(other) and (line := _values(readers[0][name], readers[1][name])):
            yield f"{name}: {line}"


def _facts(one: Manifest, two: Manifest) -> Iterator[str]:
    mine = flat({name: getattr(one, name) for name in _FACTS})
    other = flat({name: getattr(two, name) for name in _FACTS})
    for name in sorted((mine.keys() | other.keys()) - {_ASKED_FOR}):
        if mine.get(name) != other.get(name):
            yield f"{name}: {mine.get(name)!r} and {other.get(name)!r}"


def _contents(pieces: list[Piece]) -> list[tuple]:
    """Equal if cut alike and equal in every byte: then nothing need be read."""
    return [(piece.offsets, piece.sizes, piece.checksums) for piece in pieces]


def _values(one: np.ndarray, two: np.ndarray) -> str:
    if one.tobytes() == two.tobytes():
        return ""
    apart = np.abs(one.astype(np.float64) - two.astype(np.float64))
    return f"{np.count_nonzero(one != two)} of {one.size} elements differ, by {np.nanmax(apart):.3g} at most"
