"""Selects documents: drops exact copies over the whole input, and assigns the others to the splits.

The split of a document depends on the hash of its text and the validation share alone. So copies stay in one split, and
other builds with the same share choose the same documents for validation. `stream/overlap.py` checks this for a run.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.build.tokenizing import load_documents
from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import TRAIN, VALIDATION

DROPPED, IN_TRAIN, IN_VALIDATION = 0, 1, 2
CHOICE_OF_SPLIT = {TRAIN: IN_TRAIN, VALIDATION: IN_VALIDATION}
HASHES_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Selected:
    """Totals of the selected documents. The choice for each document is saved beside the output of its task."""

    tokens: dict[str, list[int]]
    """Split -> tokens of each task."""
    lengths: dict[str, int]
    """Histogram: "up to N tokens" (a power of two) -> documents."""
    hashes: dict[str, NDArray[np.uint64]]
    """Split -> upper half of the hash of each document."""
    validation_below: int | None
    """See `Manifest.validation_below`."""


def select_documents(
    work: Path,
    tasks: int,
    validation_share: float,
    deduplicate: bool,
    counts: Counter[str],
    first_validation_file: int | None = None,
) -> Selected:
    """Saves the `choice_file` of each task and adds dropped copies to `counts`.

    With `first_validation_file`, the documents of that file and later ones are the validation split, and copies of
    them are dropped from the others. DataError if no document remains for training."""
    tables = [load_documents(work, number) for number in range(tasks)]
    if not sum(map(len, tables)):
        dropped = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        raise DataError(f"no documents remain ({dropped or 'the inputs are empty'}); check the inputs and --text-key")
    choices = [np.full(len(table), IN_TRAIN, np.uint8) for table in tables]
    if first_validation_file is not None:
        dropped = _take_validation(tables, choices, first_validation_file)
        if dropped:
            counts["dropped: copy of a validation document"] += dropped
    if deduplicate:
        dropped = _drop_copies(tables, choices)
        if dropped:
            counts["dropped: copy of another document"] += dropped
    below = None
    if first_validation_file is None:
        below = _choose_validation(tables, choices, validation_share) if validation_share else 0
    for number, choice in enumerate(choices):
        choice.tofile(choice_file(work, number))
    tokens = {
        split: [int(table["length"][choice == value].sum()) for table, choice in zip(tables, choices, strict=True)]
        for split, value in CHOICE_OF_SPLIT.items()
    }
    if not sum(tokens[TRAIN]):
        raise DataError(_nothing_to_train_on(validation_share, first_validation_file))
    lengths = [table["length"][choice != DROPPED] for table, choice in zip(tables, choices, strict=True)]
    hashes = {
        split: np.concatenate([t["hash_high"][choice == value] for t, choice in zip(tables, choices, strict=True)])
        for split, value in CHOICE_OF_SPLIT.items()
    }
    return Selected(tokens, _histogram(lengths), hashes, below)


def _nothing_to_train_on(validation_share: float, first_validation_file: int | None) -> str:
    if first_validation_file is not None:
        return "every document is in the --validation files as well; give other inputs to train on"
    return f"validation_share ({validation_share}) leaves no document to train on; lower --validation-share"


def choice_file(work: Path, task: int) -> Path:
    """The file with the choice (uint8) for each document of the task."""
    return work / f"task-{task:06d}.choice"


def _drop_copies(tables: list[NDArray[np.void]], choices: list[NDArray[np.uint8]]) -> int:
    """Keeps the first of equal documents. Compares one range of hashes at a time, so that memory is bounded."""
    total = sum(map(len, tables))
    ranges = 1 << max(0, (total // HASHES_AT_ONCE).bit_length())
    dropped = 0
    for number in range(ranges):
        indices = [
            np.flatnonzero((table["hash_high"] % np.uint64(ranges) == number) & (choice != DROPPED))
            for table, choice in zip(tables, choices, strict=True)
        ]
        high, low = (
            np.concatenate([table[key][index] for table, index in zip(tables, indices, strict=True)])
            for key in ("hash_high", "hash_low")
        )
        order = np.lexsort((low, high))  # stable: equal hashes keep the order of the input
        same = (high[order][1:] == high[order][:-1]) & (low[order][1:] == low[order][:-1])
        copy = np.zeros(len(high), bool)
        copy[order[1:][same]] = True
        dropped += int(copy.sum())
        ends = np.cumsum([len(index) for index in indices])[:-1]
        for choice, index, copies in zip(choices, indices, np.split(copy, ends), strict=True):
            choice[index[copies]] = DROPPED
    return dropped


def _take_validation(tables: list[NDArray[np.void]], choices: list[NDArray[np.uint8]], first_file: int) -> int:
    """Chooses the documents of the files from `first_file` on. Drops copies of them elsewhere, and returns how many."""
    for table, choice in zip(tables, choices, strict=True):
        choice[table["file"] >= first_file] = IN_VALIDATION
    chosen = np.concatenate([table["hash_high"][c == IN_VALIDATION] for table, c in zip(tables, choices, strict=True)])
    if not len(chosen):
        raise DataError("no document of the --validation files remains; check them and --text-key")
    chosen = np.unique(chosen)
    dropped = 0
    for table, choice in zip(tables, choices, strict=True):
        copies = (choice == IN_TRAIN) & np.isin(table["hash_high"], chosen)
        choice[copies] = DROPPED
        dropped += int(copies.sum())
    return dropped


def _choose_validation(tables: list[NDArray[np.void]], choices: list[NDArray[np.uint8]], share: float) -> int:
    """Chooses documents whose hash is below a threshold, and returns it.

    At least one is chosen if there are two different documents."""
    threshold = min(int(share * 2**64), 2**64 - 1)
    lowest = min(int(table["hash_high"].min()) for table in tables if len(table))
    highest = max(int(table["hash_high"].max()) for table in tables if len(table))
    if lowest >= threshold and lowest < highest:
        threshold = lowest + 1
    for table, choice in zip(tables, choices, strict=True):
        choice[(table["hash_high"] < np.uint64(threshold)) & (choice == IN_TRAIN)] = IN_VALIDATION
    return threshold


def _histogram(lengths: list[NDArray[np.uint64]]) -> dict[str, int]:
    """Documents by length in tokens: up to 1, 2, 4, ..."""
    counts: Counter[int] = Counter()
    for array in lengths:
        bounds = np.ceil(np.log2(array.astype(np.float64))).astype(np.int64)
        counts.update(dict(enumerate(np.bincount(bounds).tolist())))
    return {str(1 << bound): count for bound, count in sorted(counts.items()) if count}
