"""Reads parts of safetensors shards behind DCP's storage interface, so that DCP's planners decide who reads what.

Each block that is read is verified against its xxh3 checksum. Bytes go straight into the destination where possible.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from train.checkpoint.format.dtypes import DTYPES, as_bytes
from train.checkpoint.format.manifest import BLOCK_BYTES, Manifest, Piece
from train.checkpoint.format.verify import check_file, read_blocks
from train.checkpoint.stores.protocol import Folder

_THREADS = min(4, len(os.sched_getaffinity(0)))
"""Threads that read: one hashes and copies a piece while others read. More threads than cores slow each other down."""
_BLOCKS_PER_READ = 16


class ShardReader(StorageReader):
    """DCP's reader of one checkpoint. `bytes_read` counts the bytes that came from its files."""

    def __init__(self, folder: Folder, manifest: Manifest, alive: Callable[[], None] = lambda: None) -> None:
        self.folder, self.manifest, self.alive = folder, manifest, alive
        self.bytes_read = 0
        self._pieces = {(p.tensor, p.offsets): p for pieces in manifest.pieces.values() for p in pieces}
        self._unchecked = {file.name: file for file in manifest.files}
        self._lock = Lock()

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Does nothing: a reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """True: the folder is given to the constructor."""
        return True

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the constructor has set up everything."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Shapes, types and chunks of the tensors of the training state, for DCP's planner."""
        tensors = {}
        for name in self.manifest.state_names:
            pieces = self.manifest.pieces[name]
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in pieces]
            properties = TensorProperties(dtype=DTYPES[pieces[0].dtype])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(pieces[0].shape), chunks)
        return Metadata(tensors)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's items into the planner's tensors. DamagedError at the first fault."""
        items_by_piece: dict[Piece, list[ReadItem]] = {}
        for item in plan.items:
            items_by_piece.setdefault(self.piece(item), []).append(item)
        in_file_order = sorted(items_by_piece.items(), key=lambda pair: (pair[0].file, pair[0].start))
        for name in sorted({piece.file for piece in items_by_piece}):
            self._check_header(name)

        def read(piece: Piece, items: list[ReadItem]) -> None:
            source = PieceReader(self, piece)
            with self.folder.kept_open(piece.file):
                for item in sorted(items, key=lambda item: item.storage_offsets):
                    target = planner.resolve_tensor(item).detach()
                    source.read_box(tuple(item.storage_offsets), tuple(item.lengths), target)
                    planner.commit_tensor(item, target)

        with ThreadPoolExecutor(_THREADS, "checkpoint-read") as pool:
            list(pool.map(lambda pair: read(*pair), in_file_order))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def piece(self, item: ReadItem) -> Piece:
        """The stored piece from which an item reads."""
        offset = item.storage_index.offset
        assert offset is not None
        return self._pieces[item.storage_index.fqn, tuple(offset)]

    def count(self, size: int) -> None:
        """Add to `bytes_read` and report progress. Thread-safe."""
        with self._lock:
            self.bytes_read += size
        self.alive()

    def _check_header(self, name: str) -> None:
        """Check a file's size and the checksum of its header, once per file."""
        if (file := self._unchecked.pop(name, None)) is not None:
            check_file(self.folder, file)
            self.count(file.header_bytes)


class PieceReader:
    """Reads and verifies parts of one piece. It caches the last block that was needed only in part."""

    def __init__(self, reader: ShardReader, piece: Piece) -> None:
        self._reader, self._piece = reader, piece
        self._cached: tuple[int, bytearray] = (-1, bytearray())
        """Number and bytes of a block."""

    def read_box(self, offsets: tuple[int, ...], sizes: tuple[int, ...], target: Tensor) -> None:
        """Fill `target` with a box of the piece.

        If the box is one run of bytes, it is read straight into a host tensor; else through a buffer of its span."""
        dtype = DTYPES[self._piece.dtype]
        strides = torch.empty(self._piece.sizes, device="meta").stride()
        first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        start = first * dtype.itemsize
        one_run = last - first + 1 == target.numel()
        if one_run and target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype:
            self.read_range(start, as_bytes(target))
            return
        span = torch.empty(last - first + 1, dtype=dtype)
        self.read_range(start, as_bytes(span))
        target.copy_(span.as_strided(sizes, strides))

    def read_range(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of the piece from `start` on. Whole blocks are read straight into `out`."""
        stop = start + len(out)
        number = start // BLOCK_BYTES
        whole_until = -(-stop // BLOCK_BYTES) if stop == self._piece.bytes else stop // BLOCK_BYTES
        while (low := number * BLOCK_BYTES) < stop:
            if low >= start and number < whole_until:
                count = min(whole_until - number, _BLOCKS_PER_READ)
                self._read_blocks(number, out[low - start : low - start + count * BLOCK_BYTES])
            else:
                count, block = 1, self._partly_needed(number)
                part = slice(max(start, low), min(stop, low + len(block)))
                out[part.start - start : part.stop - start] = block[part.start - low : part.stop - low]
            number += count

    def _partly_needed(self, number: int) -> bytearray:
        """A whole block of which only a part is needed now. The next box often needs the rest, so it is cached."""
        if self._cached[0] != number:
            block = bytearray(min(BLOCK_BYTES, self._piece.bytes - number * BLOCK_BYTES))
            self._read_blocks(number, memoryview(block))
            self._cached = (number, block)
        return self._cached[1]

    def _read_blocks(self, number: int, out: memoryview) -> None:
        read_blocks(self._reader.folder, self._piece, number, out)
        self._reader.count(len(out))
