"""Reads tensors of a checkpoint whole or by rows, with few bytes in memory, however its pieces are cut."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from train.checkpoint.format.dtypes import DTYPES
from train.checkpoint.format.manifest import DamagedError, Manifest, Piece
from train.checkpoint.format.verify import check_file, read_manifest
from train.checkpoint.shard_reader import PieceReader, ShardReader
from train.checkpoint.stores.protocol import Folder
from train.errors import CheckpointError

T = TypeVar("T")

ROWS_ELEMENTS = 1 << 20
"""Elements that are read at a time, about: whole rows."""


class StoredTensors:
    """The tensors of one checkpoint. Each block that is read is verified."""

    def __init__(self, folder: Folder) -> None:
        """CheckpointError, which names the folder, if the manifest or the header of a shard is damaged."""
        self.folder = folder
        self.manifest: Manifest = self._named(lambda: read_manifest(folder)[0])
        self._reader = ShardReader(folder, self.manifest)
        self._open: dict[Piece, PieceReader] = {}
        for file in self.manifest.files:
            self._named(lambda file=file: check_file(folder, file))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self.manifest.pieces[name][0].shape

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor's elements."""
        return DTYPES[self.manifest.pieces[name][0].dtype]

    def whole(self, name: str) -> Tensor:
        """A whole tensor."""
        shape = self.shape(name)
        return self.rows(name, 0, shape[0]) if shape else self._scalar(name)

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """The rows from `low` up to `high` of a tensor that has rows. CheckpointError if a block is damaged."""
        out = torch.empty((high - low, *self.shape(name)[1:]), dtype=self.dtype(name))
        for piece in self.manifest.pieces[name]:
            begin, offsets = piece.offsets[0], piece.offsets[1:]
            first, last = max(low, begin), min(high, begin + piece.sizes[0])
            if first < last:
                columns = (slice(o, o + size) for o, size in zip(offsets, piece.sizes[1:], strict=True))
                target = out[(slice(first - low, last - low), *columns)]
                inside = (first - begin, *(0 for _ in offsets))
                self._read(piece, inside, (last - first, *piece.sizes[1:]), target)
        return out

    def _scalar(self, name: str) -> Tensor:
        out = torch.empty((), dtype=self.dtype(name))
        self._read(self.manifest.pieces[name][0], (), (), out)
        return out

    def _read(self, piece: Piece, offsets: tuple[int, ...], sizes: tuple[int, ...], target: Tensor) -> None:
        if piece not in self._open:  # a reader keeps a block of which the next rows need the rest
            self._open = {kept: reader for kept, reader in self._open.items() if kept.tensor == piece.tensor}
            self._open[piece] = PieceReader(self._reader, piece)
        self._named(lambda: self._open[piece].read_box(offsets, sizes, target))

    def _named(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except DamagedError as error:
            raise CheckpointError(f"the checkpoint {self.folder} is damaged: {error}; nothing was written") from error


def row_ranges(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first, one past the last) of the rows to read at a time."""
    step = max(1, ROWS_ELEMENTS // max(1, math.prod(shape[1:])))
    return [(low, min(low + step, shape[0])) for low in range(0, shape[0], step)]
