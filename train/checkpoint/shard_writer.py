"""Writes safetensors shards behind DCP's storage interface, so that DCP's planners decide which rank writes what."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from train.checkpoint.format.dtypes import DTYPE_NAMES, as_bytes
from train.checkpoint.format.manifest import BLOCK_BYTES, Piece, ShardFile, checksum, shard_header, shard_name
from train.checkpoint.stores.protocol import Folder
from train.errors import CheckpointError


def piece_of(item: WriteItem) -> Piece:
    """The piece that an item of a save plan describes, not yet stored."""
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


def write_shard(
    folder: Folder, name: str, parts: Sequence[tuple[Piece, Tensor]], alive: Callable[[], None] = lambda: None
) -> tuple[ShardFile, list[Piece]]:
    """Write pieces and their values as one safetensors file; returns the file and the stored pieces.

    `alive` is called after each block. CheckpointError if a value is not finite."""
    return write_blocks(folder, name, [(piece, _blocks(piece, tensor)) for piece, tensor in parts], alive)


def write_blocks(
    folder: Folder,
    name: str,
    parts: Sequence[tuple[Piece, Iterable[memoryview]]],
    alive: Callable[[], None] = lambda: None,
) -> tuple[ShardFile, list[Piece]]:
    """The same for pieces whose bytes come in blocks of BLOCK_BYTES, the last of a piece perhaps shorter."""
    header = shard_header([piece for piece, _ in parts])
    stored: list[Piece] = []

    def contents() -> Iterator[memoryview]:
        start = len(header)
        for piece, blocks in parts:
            checksums = []
            for block in blocks:  # each block is hashed while the one before goes to the disk
                checksums.append(checksum(block))
                yield block
                alive()
            stored.append(replace(piece, file=name, start=start, checksums=tuple(checksums)))
            start += piece.bytes

    folder.write(name, chain([memoryview(header)], contents()))
    size = len(header) + sum(piece.bytes for piece in stored)
    return ShardFile(name, size, len(header), checksum(header)), stored


def _blocks(piece: Piece, tensor: Tensor) -> Iterator[memoryview]:
    host = tensor.detach().cpu().contiguous()
    check_finite(piece.tensor, host)
    data = as_bytes(host)
    for at in range(0, len(data), BLOCK_BYTES):
        yield data[at : at + BLOCK_BYTES]


def check_finite(name: str, tensor: Tensor) -> None:
    """CheckpointError if an element is infinite or NaN."""
    if not is_finite(tensor):
        raise CheckpointError(f"{name} has values that are not finite; the checkpoint was not saved")


def is_finite(tensor: Tensor) -> bool:
    """True if no element is infinite or NaN. A finite sum proves it; only otherwise is each element looked at."""
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return True
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def files_and_pieces(results: Iterable[list[WriteResult]]) -> tuple[list[ShardFile], list[Piece]]:
    """The files and pieces that the ranks have written, from what `ShardWriter.write_data` returned on each."""
    written = [result.storage_data for result in chain.from_iterable(results)]
    files = [entry for entry in written if isinstance(entry, ShardFile)]
    return files, [entry for entry in written if isinstance(entry, Piece)]


class ShardWriter(StorageWriter):
    """DCP's writer of one checkpoint: one shard per rank. `finish` calls `commit(files, pieces)` on rank 0."""

    def __init__(
        self,
        folder: Folder,
        commit: Callable[[list[ShardFile], list[Piece]], object] = lambda _, __: None,
        prefix: str = "",
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.commit, self.prefix, self.alive = folder, commit, prefix, alive

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Does nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the constructor has set up everything."""

    def storage_meta(self) -> StorageMeta | None:
        """None: the manifest has all metadata."""
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """True: the folder is given to the constructor."""
        return True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans of all ranks, each with the name of the rank's shard."""
        return [replace(plan, storage_data=self.prefix + shard_name(rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard. The results carry its `Piece`s and its `ShardFile`."""
        parts = []
        for item in plan.items:
            if 0 not in (piece := piece_of(item)).sizes:
                value = planner.resolve_data(item)
                assert isinstance(value, Tensor), item
                parts.append((piece, value))
        file, pieces = write_shard(self.folder, plan.storage_data, parts, self.alive)
        written = [WriteResult(MetadataIndex(piece.tensor, piece.offsets), piece.bytes, piece) for piece in pieces]
        written.append(WriteResult(MetadataIndex(""), file.bytes, file))
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, given what every rank has written."""
        self.commit(*files_and_pieces(results))
