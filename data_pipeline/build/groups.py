"""Packs documents into rows, group by group.

A group is made of the documents of neighbouring tasks. Groups bound the memory and can be packed in parallel. They
depend on the tasks alone, never on the number of workers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.build.packing import Packing, Pieces, pack
from data_pipeline.build.selection import CHOICE_OF_SPLIT, choice_file
from data_pipeline.build.tokenizing import DOCUMENT, load_documents

_PARTS = ("document", "offset", "length", "row_start")

PLACED = np.dtype([*DOCUMENT.descr, ("task", "<u4"), ("first_token", "<u8")])
"""A document, and where its tokens are: the task, and the first token in the task's file of tokens."""


@dataclass(frozen=True)
class Group:
    """Documents of one split that are packed together. Their rows are saved in the work folder under `name`."""

    name: str
    rows: int
    documents: int
    tokens: int
    documents_cut: int
    """Documents that are in more than one row."""


def group_tasks(tokens: Sequence[int], group_tokens: int) -> list[range]:
    """Ranges of neighbouring tasks with at least `group_tokens` each, except the last. `tokens` counts them by task."""
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
    """Packs the split's documents of these tasks and saves the result.

    `tasks` maps each task to the number of earlier records of each of its files."""
    documents = np.concatenate([_documents_of(work, task, split, bases) for task, bases in tasks.items()])
    pieces = pack(documents["length"].astype(np.int64), row_tokens, packing)
    for part in _PARTS:
        np.save(work / f"{name}.{part}.npy", getattr(pieces, part))
    np.save(work / f"{name}.documents.npy", documents)
    pieces_of_document = np.bincount(pieces.document, minlength=1)
    documents_cut = int(np.count_nonzero(pieces_of_document > 1))
    return Group(name, pieces.rows, len(documents), int(documents["length"].sum()), documents_cut)


def _documents_of(work: Path, task: int, split: str, bases: Mapping[int, int]) -> NDArray[np.void]:
    """The task's documents in the split, as PLACED, with their numbers in the entire file."""
    documents = load_documents(work, task)
    out = np.empty(len(documents), PLACED)
    for field in DOCUMENT.names or ():
        out[field] = documents[field]
    if any(bases.values()):
        out["document"] += np.array([bases[file] for file in documents["file"].tolist()], np.uint64)
    out["task"] = task
    out["first_token"] = np.cumsum(documents["length"]) - documents["length"]
    choice = np.fromfile(choice_file(work, task), np.uint8)
    return out[choice == CHOICE_OF_SPLIT[split]]


def load_pieces(work: Path, group: Group) -> Pieces:
    """The group's pieces, mapped into memory."""
    return Pieces(*(np.load(work / f"{group.name}.{part}.npy", mmap_mode="r") for part in _PARTS))


def groups_with_rows(
    work: Path, groups: Sequence[Group], rows: range
) -> Iterator[tuple[int, NDArray[np.void], Pieces]]:
    """The groups that have some of these rows of the split: first row in the split, documents (PLACED), and pieces."""
    first = 0
    for group in groups:
        if first < rows.stop and first + group.rows > rows.start:
            yield first, np.load(work / f"{group.name}.documents.npy", mmap_mode="r"), load_pieces(work, group)
        first += group.rows
