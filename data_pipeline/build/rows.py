"""Writes the rows of a split as shards. Every shard except the last has the same number of rows, across groups."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.build.groups import Group, groups_with_rows, load_pieces
from data_pipeline.build.packing import Pieces
from data_pipeline.build.tokenizing import task_files
from data_pipeline.sealed_result import read_result, write_result
from data_pipeline.shards.manifest import Shard
from data_pipeline.shards.shard_file import HEADER_BYTES, PIECE, Block, Rows, ShardShape, write_shard


def plan_shards(work: Path, groups: Sequence[Group], shape: ShardShape, shard_bytes: int) -> list[range]:
    """The rows of each shard: as many whole blocks as keep the largest shard below `shard_bytes`, uncompressed."""
    total = sum(group.rows for group in groups)
    if not total:
        return []
    pieces = np.concatenate([np.diff(load_pieces(work, group).row_start) for group in groups])
    row_bytes = shape.row_items * shape.token_bytes + 4 + pieces.astype(np.int64) * PIECE.itemsize
    blocks = np.add.reduceat(row_bytes, np.arange(0, total, shape.block_rows)) + 4 + 32  # with its share of the index
    per_shard = max(1, min(len(blocks), shard_bytes // int(blocks[0])))
    while per_shard > 1 and _largest_shard(blocks, per_shard) + HEADER_BYTES + 16 > shard_bytes:
        per_shard -= max(1, per_shard // 50)
    rows = per_shard * shape.block_rows
    return [range(start, min(start + rows, total)) for start in range(0, total, rows)]


def _largest_shard(blocks: NDArray[np.int64], per_shard: int) -> int:
    return int(np.add.reduceat(blocks, np.arange(0, len(blocks), per_shard)).max())


def write_rows(
    work: Path, path: Path, groups: Sequence[Group], rows: range, shape: ShardShape, end_of_document: int
) -> Shard:
    """Writes the shard of these rows of the split, unless it was written before, and returns its description."""
    done = work / f"{path.name}.json"
    if (written := read_result(done, [path])) is None:
        shape = replace(shape, rows=len(rows))
        blocks = _blocks(work, groups, rows, shape, end_of_document)
        checksum = write_shard(path, shape, blocks)
        written = vars(Shard(f"{path.parent.name}/{path.name}", len(rows), path.stat().st_size, checksum))
        write_result(done, written, [path])
    return Shard(**written)


def _blocks(
    work: Path, groups: Sequence[Group], rows: range, shape: ShardShape, end_of_document: int
) -> Iterator[Block]:
    sources = list(groups_with_rows(work, groups, rows))
    tokens = _Tokens(work, shape.dtype)
    for start in range(rows.start, rows.stop, shape.block_rows):
        block_rows = range(start, min(start + shape.block_rows, rows.stop))
        out = np.full((len(block_rows), shape.row_items), end_of_document, shape.dtype)
        parts = [
            _fill(out[max(first - start, 0) :], shape, _pieces_of(documents, packed, block_rows, first), tokens)
            for first, documents, packed in sources
            if first < block_rows.stop and first + packed.rows > block_rows.start
        ]
        counts = np.concatenate([count for count, _ in parts])
        yield Block(out, np.cumsum([0, *counts]).astype(np.uint32), np.concatenate([pieces for _, pieces in parts]))


@dataclass(frozen=True)
class _PiecesOfRows:
    """The pieces of some rows, in order."""

    counts: NDArray[np.int64]
    """Number of pieces of each row."""
    documents: NDArray[np.void]
    """The document (PLACED) of each piece."""
    offsets: NDArray[np.int64]
    """First token of the document in each piece."""
    lengths: NDArray[np.int64]


def _pieces_of(documents: NDArray[np.void], packed: Pieces, rows: range, first_row: int) -> _PiecesOfRows:
    """The pieces of those of the split's rows that are in the group, whose first row is `first_row`."""
    begin, end = max(rows.start - first_row, 0), min(rows.stop - first_row, packed.rows)
    starts = packed.row_start[begin : end + 1]
    pieces = slice(int(starts[0]), int(starts[-1]))
    return _PiecesOfRows(
        np.diff(starts), documents[packed.document[pieces]], packed.offset[pieces], packed.length[pieces]
    )


def _fill(out: Rows, shape: ShardShape, pieces: _PiecesOfRows, tokens: "_Tokens") -> tuple[NDArray, NDArray[np.void]]:
    """Writes the tokens into the first rows of `out`. Returns the number of pieces per row, and the pieces (PIECE)."""
    rows = np.repeat(np.arange(len(pieces.counts)), pieces.counts)
    ends = np.cumsum(pieces.lengths)
    used = np.bincount(rows, pieces.lengths, len(pieces.counts)).astype(np.int64)
    starts = ends - pieces.lengths - (np.cumsum(used) - used)[rows]
    tasks, first_tokens = pieces.documents["task"].tolist(), pieces.documents["first_token"].astype(np.int64)
    sources = (first_tokens + pieces.offsets).tolist()
    # Plain lists, because indexing arrays one item at a time is slow.
    copies = zip(rows.tolist(), starts.tolist(), pieces.lengths.tolist(), tasks, sources, strict=True)
    for row, start, length, task, source in copies:
        begin = shape.prefix + start
        out[row, begin : begin + length] = tokens.of(task)[source : source + length]
    out[: len(used), : shape.prefix] = used.astype("<u4").view(shape.dtype).reshape(len(used), shape.prefix)
    origins = np.empty(len(rows), PIECE)
    origins["start"], origins["offset"] = starts, pieces.offsets
    origins["file"], origins["document"] = pieces.documents["file"], pieces.documents["document"]
    return pieces.counts, origins


class _Tokens:
    """The tokens of the tasks, each file mapped into memory at its first use."""

    def __init__(self, work: Path, dtype: np.dtype) -> None:
        self._work, self._dtype = work, dtype
        self._maps: dict[int, NDArray] = {}

    def of(self, task: int) -> NDArray:
        """All tokens of a task."""
        if task not in self._maps:
            self._maps[task] = np.asarray(np.memmap(task_files(self._work, task).tokens, self._dtype, "r"))
        return self._maps[task]
