"""Safetensors shards behind DCP's storage interfaces, so that its planners decide who writes and reads what.

`ShardWriter` writes one shard per rank and, on rank 0, the manifest. `ShardReader` reads the parts of pieces that a
load plan asks for, each block checked against its xxh3, straight into the destination where that is possible.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from train.checkpoint.format.dtypes import DTYPE_NAMES, DTYPES
from train.checkpoint.format.manifest import (
    BLOCK_BYTES,
    Manifest,
    Piece,
    ShardFile,
    checksum,
    shard_header,
)
from train.checkpoint.format.verify import check_file, read_blocks
from train.checkpoint.stores.protocol import Folder
from train.errors import CheckpointError

_READERS = min(4, len(os.sched_getaffinity(0)))
"""Threads that read; hashing and copying one piece overlaps with reading others. More than cores only get in each
other's way."""
_BLOCKS_AT_ONCE = 16


def shard_name(rank: int) -> str:
    return f"shard-{rank:05d}.safetensors"


def piece_of(item: WriteItem) -> Piece:
    data = item.tensor_data
    assert data is not None, f"{item.index.fqn} is not a tensor"
    chunk = data.chunk
    return Piece(
        item.index.fqn,
        DTYPE_NAMES[data.properties.dtype],
        tuple(data.size),
        tuple(chunk.offsets),
        tuple(chunk.sizes),
    )


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_shard(
    folder: Folder, name: str, parts: Sequence[tuple[Piece, Tensor]], alive: Callable[[], None] = lambda: None
) -> tuple[ShardFile, list[Piece]]:
    """Write the pieces with these values as one safetensors file; returns where they lie and their checksums. `alive`
    is called between blocks."""
    header = shard_header([piece for piece, _ in parts])
    placed: list[Piece] = []

    def contents() -> Iterator[memoryview]:
        start = len(header)
        for piece, tensor in parts:
            host = tensor.detach().cpu().contiguous()
            if not is_finite(host):
                raise CheckpointError(f"{piece.tensor} holds values that are not finite; nothing was saved")
            data, checksums = as_bytes(host), []
            for at in range(0, len(data), BLOCK_BYTES):  # each is hashed while the one before goes to the disk
                block = data[at : at + BLOCK_BYTES]
                checksums.append(checksum(block))
                yield block
                alive()
            placed.append(replace(piece, file=name, start=start, checksums=tuple(checksums)))
            start += len(data)

    folder.write(name, chain([memoryview(header)], contents()))
    size = len(header) + sum(piece.bytes for piece in placed)
    return ShardFile(name, size, len(header), checksum(header)), placed


class ShardWriter(StorageWriter):
    """DCP writes one checkpoint through this; rank 0 calls `commit(files, pieces)` when every shard is durable."""

    def __init__(
        self,
        folder: Folder,
        commit: Callable[[list[ShardFile], list[Piece]], None],
        prefix: str = "",
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.commit, self.prefix, self.alive = folder, commit, prefix, alive

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def storage_meta(self) -> StorageMeta | None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=self.prefix + shard_name(rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts = []
        for item in plan.items:
            if 0 not in (piece := piece_of(item)).sizes:
                value = planner.resolve_data(item)
                assert isinstance(value, Tensor), item
                parts.append((piece, value))
        file, pieces = write_shard(self.folder, plan.storage_data, parts, self.alive)
        results = [WriteResult(MetadataIndex(piece.tensor, piece.offsets), piece.bytes, piece) for piece in pieces]
        results.append(WriteResult(MetadataIndex(""), file.bytes, file))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result.storage_data for result in chain.from_iterable(results)]
        files = [entry for entry in written if isinstance(entry, ShardFile)]
        self.commit(files, [entry for entry in written if isinstance(entry, Piece)])


class ShardReader(StorageReader):
    """DCP reads one checkpoint through this. `bytes_read` counts what came from the files."""

    def __init__(self, folder: Folder, manifest: Manifest, alive: Callable[[], None] = lambda: None) -> None:
        self.folder, self.manifest, self.alive = folder, manifest, alive
        self.bytes_read = 0
        self._pieces = {(p.tensor, p.offsets): p for pieces in manifest.pieces.values() for p in pieces}
        self._unchecked = {file.name: file for file in manifest.files}
        self._lock = Lock()

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors = {}
        for name in self.manifest.state_names:
            pieces = self.manifest.pieces[name]
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in pieces]
            properties = TensorProperties(dtype=DTYPES[pieces[0].dtype])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(pieces[0].shape), chunks)
        return Metadata(tensors)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[Piece, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(self.piece(item), []).append(item)
        in_order = sorted(wanted.items(), key=lambda pair: (pair[0].file, pair[0].start))
        for name in sorted({piece.file for piece in wanted}):
            self._check_header(name)

        def read(piece: Piece, items: list[ReadItem]) -> None:
            source = _PieceReader(self, piece)
            with self.folder.held(piece.file):
                for item in sorted(items, key=lambda item: item.storage_offsets):
                    target = planner.resolve_tensor(item).detach()
                    source.read_box(tuple(item.storage_offsets), tuple(item.lengths), target)
                    planner.commit_tensor(item, target)

        with ThreadPoolExecutor(_READERS, "checkpoint-read") as pool:
            list(pool.map(lambda pair: read(*pair), in_order))
        return _done(None)

    def piece(self, item: ReadItem) -> Piece:
        offset = item.storage_index.offset
        assert offset is not None
        return self._pieces[item.storage_index.fqn, tuple(offset)]

    def read_whole(self, piece: Piece) -> bytes:
        data = bytearray(piece.bytes)
        self._check_header(piece.file)
        _PieceReader(self, piece).read_range(0, memoryview(data))
        return bytes(data)

    def count(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size
        self.alive()

    def _check_header(self, name: str) -> None:
        """Once per file: its size and the checksum of its header."""
        if (file := self._unchecked.pop(name, None)) is not None:
            check_file(self.folder, file)
            self.count(file.header_bytes)


class _PieceReader:
    """Reads parts of one piece, whose blocks it checks; the last block of which only a part was wanted is kept."""

    def __init__(self, reader: ShardReader, piece: Piece) -> None:
        self._reader, self._piece = reader, piece
        self._kept: tuple[int, bytearray] = (-1, bytearray())

    def read_box(self, offsets: tuple[int, ...], sizes: tuple[int, ...], target: Tensor) -> None:
        """Fill `target` with a box of the piece: directly if its bytes are one run, else by a buffer of its span."""
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
        """Bytes [start, start + len(out)) of the piece; whole blocks go straight to `out`, several at once."""
        stop = start + len(out)
        number = start // BLOCK_BYTES
        whole_until = -(-stop // BLOCK_BYTES) if stop == self._piece.bytes else stop // BLOCK_BYTES
        while (low := number * BLOCK_BYTES) < stop:
            if low >= start and number < whole_until:
                count = min(whole_until - number, _BLOCKS_AT_ONCE)
                self._read_blocks(number, out[low - start : low - start + count * BLOCK_BYTES])
            else:
                count, block = 1, self._part(number)
                part = slice(max(start, low), min(stop, low + len(block)))
                out[part.start - start : part.stop - start] = block[part.start - low : part.stop - low]
            number += count

    def _part(self, number: int) -> bytearray:
        """A block of which not all is wanted now; the next box may well want the rest."""
        if self._kept[0] != number:
            block = bytearray(min(BLOCK_BYTES, self._piece.bytes - number * BLOCK_BYTES))
            self._read_blocks(number, memoryview(block))
            self._kept = (number, block)
        return self._kept[1]

    def _read_blocks(self, number: int, out: memoryview) -> None:
        read_blocks(self._reader.folder, self._piece, number, out)
        self._reader.count(len(out))


def is_finite(tensor: Tensor) -> bool:
    """A sum is not finite if an element is not; only a suspicious one costs the exact look."""
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return True
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future
