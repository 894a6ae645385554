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

from data_pipeline.manifest import TRAIN, Shard, Split, write_whole
from data_pipeline.packing import Packing, Pieces, pack
from data_pipeline.selection import IN_HELD_OUT, IN_TRAIN, choice_file
from data_pipeline.shards import HEADER_BYTES, PIECE, Block, ShardShape, write_shard
from data_pipeline.tokenizing import DOCUMENT, load_documents, task_files

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
    if first < len(tokens):
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
    return out[choice == (IN_TRAIN if split == TRAIN else IN_HELD_OUT)]


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
    tokens: dict[int, NDArray] = {}
    for start in range(rows.start, rows.stop, shape.block_rows):
        wanted = range(start, min(start + shape.block_rows, rows.stop))
        out = np.full((len(wanted), shape.row_items), end_of_document, shape.dtype)
        used = np.zeros(len(wanted), "<u4")
        piece_start, pieces = [0], []
        for first_row, documents, packed in sources:
            for row in range(max(wanted.start, first_row), min(wanted.stop, first_row + packed.rows)):
                begin, end = packed.row_start[row - first_row : row - first_row + 2].tolist()
                position = 0
                for piece in range(begin, end):
                    document = documents[packed.document[piece]]
                    offset, length = int(packed.offset[piece]), int(packed.length[piece])
                    task = int(document["task"])
                    if task not in tokens:
                        tokens[task] = np.memmap(task_files(work, task).tokens, shape.dtype, "r")
                    at = int(document["first_token"]) + offset
                    place = shape.prefix + position
                    out[row - start, place : place + length] = tokens[task][at : at + length]
                    pieces.append((position, document["file"], document["document"], offset))
                    position += length
                used[row - start] = position
                piece_start.append(len(pieces))
        out[:, : shape.prefix] = used.view(shape.dtype).reshape(len(wanted), shape.prefix)
        yield Block(out, np.array(piece_start, np.uint32), np.array(pieces, PIECE))


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
