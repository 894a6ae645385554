"""Rows as stored into the arrays of a batch. B rows, T tokens."""

import numpy as np
from numpy.typing import NDArray

from data_pipeline.batch import IGNORE, Batch
from data_pipeline.shards import Rows


def assemble(
    tokens_BT: Rows, used_B: NDArray[np.int64], end_of_document: int, sources_B: NDArray, samples_B: NDArray
) -> Batch:
    """A document ends with `end_of_document` or with the row; from `used_B[b]` on a row is padding."""
    rows, width = tokens_BT.shape
    ends_BT = tokens_BT == end_of_document
    short = np.flatnonzero(used_B < width)
    for row in short.tolist():
        ends_BT[row, max(used_B[row] - 1, 0) :] = False
        ends_BT[row, used_B[row] - 1 : used_B[row]] = True  # padding starts a document of its own
    ends_BT[:, -1] = True
    last = np.flatnonzero(ends_BT)  # in the flat array, the last position of each piece
    lengths = np.diff(last, prepend=-1)
    flat = np.arange(rows * width)
    positions = flat - np.repeat(last + 1 - lengths, lengths)
    row_of_piece = last // width
    first_of_row = np.searchsorted(row_of_piece, np.arange(rows))
    numbers = np.arange(len(last)) - first_of_row[row_of_piece]
    tokens = tokens_BT.astype(np.int64)
    labels = np.empty_like(tokens)
    labels[:, :-1] = tokens[:, 1:]
    labels.reshape(-1)[last] = IGNORE
    for row in short.tolist():
        labels[row, max(used_B[row] - 1, 0) :] = IGNORE
    return Batch(
        tokens_BT=tokens,
        labels_BT=labels,
        positions_BT=positions.reshape(rows, width),
        documents_BT=np.repeat(numbers.astype(np.int32), lengths).reshape(rows, width),
        sources_B=sources_B,
        samples_B=samples_B,
    )


def cut(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch, sharing its memory."""
    return Batch(
        batch.tokens_BT[rows],
        batch.labels_BT[rows],
        batch.positions_BT[rows],
        batch.documents_BT[rows],
        batch.sources_B[rows],
        batch.samples_B[rows],
    )
