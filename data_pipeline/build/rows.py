"""Second stage of preparation: documents of all tasks are chosen, split, packed into rows and written as shards.

Documents are packed in groups of neighbouring tasks, so that memory is bounded and groups can be packed side by side;
the groups depend on the tasks alone. Shards hold equal numbers of rows across groups.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.build.packing import Packing, Pieces, pack
from data_pipeline.build.selection import IN_TRAIN, IN_VALIDATION, choice_file
from data_pipeline.build.tokenizing import DOCUMENT, load_documents, task_files
from data_pipeline.shards.manifest import TRAIN, Shard, Split
from data_pipeline.shards.shard_file import HEADER_BYTES, PIECE, Block, Rows, ShardShape, write_shard
from data_pipeline.whole_file import write_whole

GROUP_TOKENS = 1 << 28

_PARTS = ("document", "offset", "length", "row_start")

PLACED = np.dtype([*DOCUMENT.descr, ("task", "<u4"), ("first_token", "<u8")])
"""A document and where its tokens are."""


@dataclass(frozen=True)
class Group:
    """Documents of one split that are packed together, and their rows; kept in the work folder."""

    name: str
    rows: int
    documents: int
    tokens: int
    documents_cut: int


def group_tasks(tokens: Sequence[int], group_tokens: int) -> list[range]:
    """Neighbouring tasks together until they hold `group_tokens`."""
    groups, first, size = [], 0, 0
    for number, count in enumerate(tokens):
        size += count
        if size >= group_tokens:
            groups.append(range(first, number + 1))
            first, size = number + 1, 0
    if size:
        groups.append(range(first, len(tokens)))
    return groups


def make_group(
    work: Path, name: str, split: str, tasks: Mapping[int, Mapping[int, int]], row_tokens: int, packing: Packing
) -> Group:
    """Pack the split's documents of these tasks (task -> file -> records of the file before) and save the result."""
    documents = np.concatenate([_chosen(work, number, split, bases) for number, bases in tasks.items()])
    pieces = pack(documents["length"].astype(np.int64), row_tokens, packing)
    for part in _PARTS:
        np.save(work / f"{name}.{part}.npy", getattr(pieces, part))
    np.save(work / f"{name}.documents.npy", documents)
    times_placed = np.bincount(pieces.document, minlength=1)
    return Group(
        name, pieces.rows, len(documents), int(documents["length"].sum()), int(np.count_nonzero(times_placed > 1))
    )


def _chosen(work: Path, task: int, split: str, bases: Mapping[int, int]) -> NDArray[np.void]:
    """The task's documents that are in the split, numbered within their files, and where their tokens are."""
    documents = load_documents(work, task)
    out = np.empty(len(documents), PLACED)
    for field in DOCUMENT.names or ():
        out[field] = documents[field]
    if any(bases.values()):
        out["document"] += np.array([bases[file] for file in documents["file"].tolist()], np.uint64)
    out["task"] = task
    out["first_token"] = np.cumsum(documents["length"]) - documents["length"]
    choice = np.fromfile(choice_file(work, task), np.uint8)
    return out[choice == (IN_TRAIN if split == TRAIN else IN_VALIDATION)]


def _load_group(work: Path, name: str) -> tuple[NDArray[np.void], Pieces]:
    parts = (np.load(work / f"{name}.{part}.npy", mmap_mode="r") for part in _PARTS)
    return np.load(work / f"{name}.documents.npy", mmap_mode="r"), Pieces(*parts)


def plan_shards(work: Path, groups: Sequence[Group], shape: ShardShape, shard_bytes: int) -> list[range]:
    """Rows of each shard: as many whole blocks as keep the largest one below `shard_bytes`."""
    total = sum(group.rows for group in groups)
    if not total:
        return []
    pieces = np.concatenate([np.diff(_load_group(work, group.name)[1].row_start) for group in groups])
    row_bytes = shape.row_items * shape.token_bytes + 4 + pieces.astype(np.int64) * PIECE.itemsize
    blocks = np.add.reduceat(row_bytes, np.arange(0, total, shape.block_rows)) + 4 + 32  # and its part of the index
    per_shard = max(1, min(len(blocks), shard_bytes // int(blocks[0])))
    while per_shard > 1 and _largest(blocks, per_shard) + HEADER_BYTES + 16 > shard_bytes:
        per_shard -= max(1, per_shard // 50)
    rows = per_shard * shape.block_rows
    return [range(start, min(start + rows, total)) for start in range(0, total, rows)]


def _largest(blocks: NDArray[np.int64], per_shard: int) -> int:
    return int(np.add.reduceat(blocks, np.arange(0, len(blocks), per_shard)).max())


def write_rows(
    work: Path, path: Path, groups: Sequence[Group], rows: range, shape: ShardShape, end_of_document: int
) -> Shard:
    """The shard of these rows of the groups' rows in a line; if it is there already, it is whole and only described."""
    done = work / f"{path.name}.json"
    if not (path.exists() and done.exists()):
        shape = replace(shape, rows=len(rows))
        blocks = _blocks(work, groups, rows, shape, end_of_document)
        checksum = write_shard(path, shape, blocks)
        shard = Shard(f"{path.parent.name}/{path.name}", len(rows), path.stat().st_size, checksum)
        write_whole(done, json.dumps(vars(shard)).encode())
    return Shard(**json.loads(done.read_text()))


def _blocks(
    work: Path, groups: Sequence[Group], rows: range, shape: ShardShape, end_of_document: int
) -> Iterator[Block]:
    sources = list(_overlapping(work, groups, rows))
    tokens = _Tokens(work, shape.dtype)
    for start in range(rows.start, rows.stop, shape.block_rows):
        wanted = range(start, min(start + shape.block_rows, rows.stop))
        out = np.full((len(wanted), shape.row_items), end_of_document, shape.dtype)
        parts = [
            _fill(out[max(first - start, 0) :], shape, _pieces_of(documents, packed, wanted, first), tokens)
            for first, documents, packed in sources
            if first < wanted.stop and first + packed.rows > wanted.start
        ]
        counts = np.concatenate([count for count, _ in parts])
        yield Block(out, np.cumsum([0, *counts]).astype(np.uint32), np.concatenate([pieces for _, pieces in parts]))


@dataclass(frozen=True)
class _PiecesOfRows:
    """Pieces of some rows, in order, as plain lists: the loop over them is the hot one."""

    counts: NDArray[np.int64]  # pieces of each row
    documents: NDArray[np.void]  # PLACED, of each piece
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]


def _pieces_of(documents: NDArray[np.void], packed: Pieces, rows: range, first_row: int) -> _PiecesOfRows:
    begin, end = max(rows.start - first_row, 0), min(rows.stop - first_row, packed.rows)
    starts = packed.row_start[begin : end + 1]
    pieces = slice(int(starts[0]), int(starts[-1]))
    return _PiecesOfRows(
        np.diff(starts), documents[packed.document[pieces]], packed.offset[pieces], packed.length[pieces]
    )


def _fill(out: Rows, shape: ShardShape, pieces: _PiecesOfRows, tokens: "_Tokens") -> tuple[NDArray, NDArray[np.void]]:
    """Write the rows' tokens into the first rows of `out`. Returns pieces of each row, and the pieces (PIECE)."""
    rows = np.repeat(np.arange(len(pieces.counts)), pieces.counts)
    ends = np.cumsum(pieces.lengths)
    used = np.bincount(rows, pieces.lengths, len(pieces.counts)).astype(np.int64)
    starts = ends - pieces.lengths - (np.cumsum(used) - used)[rows]
    tasks, first_tokens = pieces.documents["task"].tolist(), pieces.documents["first_token"].astype(np.int64)
    sources = (first_tokens + pieces.offsets).tolist()
    places = zip(rows.tolist(), starts.tolist(), pieces.lengths.tolist(), tasks, sources, strict=True)
    for row, start, length, task, source in places:
        begin = shape.prefix + start
        out[row, begin : begin + length] = tokens.of(task)[source : source + length]
    out[: len(used), : shape.prefix] = used.astype("<u4").view(shape.dtype).reshape(len(used), shape.prefix)
    origins = np.empty(len(rows), PIECE)
    origins["start"], origins["offset"] = starts, pieces.offsets
    origins["file"], origins["document"] = pieces.documents["file"], pieces.documents["document"]
    return pieces.counts, origins


class _Tokens:
    """The tokens of tasks, mapped."""

    def __init__(self, work: Path, dtype: np.dtype) -> None:
        self._work, self._dtype = work, dtype
        self._maps: dict[int, NDArray] = {}

    def of(self, task: int) -> NDArray:
        if task not in self._maps:
            self._maps[task] = np.asarray(np.memmap(task_files(self._work, task).tokens, self._dtype, "r"))
        return self._maps[task]


def _overlapping(work: Path, groups: Sequence[Group], rows: range) -> Iterator[tuple[int, NDArray[np.void], Pieces]]:
    first = 0
    for group in groups:
        if first < rows.stop and first + group.rows > rows.start:
            yield first, *_load_group(work, group.name)
        first += group.rows


def describe(groups: Sequence[Group], shards: Sequence[Shard], row_tokens: int) -> Split:
    rows = sum(group.rows for group in groups)
    tokens = sum(group.tokens for group in groups)
    return Split(
        rows=rows,
        documents=sum(group.documents for group in groups),
        tokens=tokens,
        padding=rows * row_tokens - tokens,
        documents_cut=sum(group.documents_cut for group in groups),
        shards=tuple(shards),
        groups=tuple(np.cumsum([0, *(group.rows for group in groups)])[:-1].tolist()),
    )
