"""The hashes of a data set's documents, by split. With them, a run finds out whether its sources share documents.

Each split has a file of sorted uint64 numbers, little-endian: the upper half of each document's hash, copies once. The
files have no checksum: training does not read them, and damage can only hide a document that is in two sources."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.atomic_file import write_atomic
from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.storage import Span, read_checked

_FIRST_BYTES = 1 << 20


def hash_file(split: str) -> str:
    """The path of the split's file in the data set."""
    return f"hashes/{split}.u64"


def write_hashes(folder: Path, split: str, hashes: NDArray[np.uint64]) -> None:
    """Writes the file of the split in the data set's folder."""
    path = folder / hash_file(split)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, np.unique(hashes).astype("<u8").tobytes())


def read_hashes(dataset: DataSet, split: str, below: int) -> NDArray[np.uint64]:
    """The hashes of the split's documents that are below a bound. DataError if they cannot be read.

    Only the beginning of the file is read, up to the bound."""
    total = dataset.manifest.hashes[split]
    number = min(total, _FIRST_BYTES // 8)
    while True:
        hashes = _read(dataset, split, number)
        if number == total or int(hashes[-1]) >= below:
            return hashes if below >= 2**64 else hashes[hashes < np.uint64(below)]
        number = min(total, 4 * number)


def _read(dataset: DataSet, split: str, number: int) -> NDArray[np.uint64]:
    if not number:
        return np.empty(0, np.uint64)
    span = Span(hash_file(split), 0, 8 * number)
    (answer,) = read_checked(dataset.storages, [span], lambda number, data: None)
    if isinstance(answer, DataError):
        raise answer
    return np.frombuffer(answer, "<u8")
