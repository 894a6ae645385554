"""Which documents are kept, and in which split: exact copies dropped over the whole input, some held out by their hash.

Being held out depends on a document's text alone, so copies stay together and another build holds out the same ones.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.build.tokenizing import load_documents
from data_pipeline.errors import DataError

DROPPED, IN_TRAIN, IN_VALIDATION = 0, 1, 2
HASHES_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Selected:
    """Tokens by task, and what the kept documents are like. The choice itself is saved beside each task's output."""

    train_tokens: list[int]
    validation_tokens: list[int]
    documents: int
    histogram: dict[str, int]


def select_documents(
    work: Path, tasks: int, validation_share: float, deduplicate: bool, counts: Counter[str]
) -> Selected:
    """Saves `choice_file` of each task. DataError if nothing is left to train on."""
    tables = [load_documents(work, number) for number in range(tasks)]
    if not sum(map(len, tables)):
        dropped = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        raise DataError(f"no documents are left ({dropped or 'the inputs are empty'}); check the inputs and --text-key")
    choices = [np.full(len(table), IN_TRAIN, np.uint8) for table in tables]
    if deduplicate:
        dropped = _drop_copies(tables, choices)
        if dropped:
            counts["dropped: copy of another document"] += dropped
    if validation_share:
        _choose_validation(tables, choices, validation_share)
    for number, choice in enumerate(choices):
        choice.tofile(choice_file(work, number))
    by_split = [
        [int(table["length"][choice == split].sum()) for table, choice in zip(tables, choices, strict=True)]
        for split in (IN_TRAIN, IN_VALIDATION)
    ]
    if not sum(by_split[0]):
        raise DataError(
            f"validation_share ({validation_share}) leaves no document to train on; lower --validation-share"
        )
    lengths = [table["length"][choice > 0] for table, choice in zip(tables, choices, strict=True)]
    return Selected(by_split[0], by_split[1], sum(map(len, lengths)), _histogram(lengths))


def choice_file(work: Path, task: int) -> Path:
    return work / f"task-{task:06d}.choice"


def _drop_copies(tables: list[NDArray[np.void]], choices: list[NDArray[np.uint8]]) -> int:
    """Keep the first of equal documents. Part of the range of hashes at a time, so that memory is bounded."""
    total = sum(map(len, tables))
    ranges = 1 << max(0, (total // HASHES_AT_ONCE).bit_length())
    dropped = 0
    for number in range(ranges):
        indices = [np.flatnonzero(table["hash_high"] % np.uint64(ranges) == number) for table in tables]
        high, low = (
            np.concatenate([table[key][index] for table, index in zip(tables, indices, strict=True)])
            for key in ("hash_high", "hash_low")
        )
        order = np.lexsort((low, high))  # stable: the first of a run came first
        same = (high[order][1:] == high[order][:-1]) & (low[order][1:] == low[order][:-1])
        copy = np.zeros(len(high), bool)
        copy[order[1:][same]] = True
        dropped += int(copy.sum())
        ends = np.cumsum([len(index) for index in indices])[:-1]
        for choice, index, copies in zip(choices, indices, np.split(copy, ends), strict=True):
            choice[index[copies]] = DROPPED
    return dropped


def _choose_validation(tables: list[NDArray[np.void]], choices: list[NDArray[np.uint8]], share: float) -> None:
    """At least one document, if there are two different ones."""
    threshold = min(int(share * 2**64), 2**64 - 1)
    lowest = min(int(table["hash_high"].min()) for table in tables if len(table))
    highest = max(int(table["hash_high"].max()) for table in tables if len(table))
    if lowest >= threshold and lowest < highest:
        threshold = lowest + 1
    for table, choice in zip(tables, choices, strict=True):
        choice[(table["hash_high"] < np.uint64(threshold)) & (choice == IN_TRAIN)] = IN_VALIDATION


def _histogram(lengths: list[NDArray[np.uint64]]) -> dict[str, int]:
    """Documents by length in tokens: up to 1, 2, 4, ..."""
    counts: Counter[int] = Counter()
    for array in lengths:
        bounds = np.ceil(np.log2(array.astype(np.float64))).astype(np.int64)
        counts.update(dict(enumerate(np.bincount(bounds).tolist())))
    return {str(1 << bound): count for bound, count in sorted(counts.items()) if count}
