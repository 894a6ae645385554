"""Rows as stored into the arrays of batches. B rows, T tokens, P pieces of documents.

Everything is done for many rows at once: a micro batch alone may be so small that calls cost more than the work.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.shards.shard_file import Rows
from data_pipeline.stream.batch import IGNORE, Batch
from data_pipeline.stream.mixture import Samples


@dataclass(frozen=True)
class Stored:
    """Rows and the pieces in them; positions are in the rows laid end to end. The end of a row ends a piece."""

    tokens_BT: Rows
    used_B: NDArray[np.int64]
    samples: Samples
    last_P: NDArray[np.int64]
    lengths_P: NDArray[np.int64]
    numbers_P: NDArray[np.int32]
    """Within the row."""


def find_pieces(tokens_BT: Rows, used_B: NDArray[np.int64], end_of_document: int, samples: Samples) -> Stored:
    """A document ends with `end_of_document` or with the row; from `used_B[b]` on a row is padding."""
    width = tokens_BT.shape[1]
    ends_BT = tokens_BT == end_of_document
    for row in np.flatnonzero(used_B < width).tolist():
        used = int(used_B[row])
        ends_BT[row, used:] = False
        ends_BT[row, max(used - 1, 0)] |= used > 0  # padding is a document of its own
    ends_BT[:, -1] = True
    last = np.flatnonzero(ends_BT)
    lengths = last.copy()
    lengths[1:] -= last[:-1]
    lengths[0] += 1
    pieces_of_row = np.bincount(last // width)
    numbers = np.arange(len(last)) - np.repeat(np.cumsum(pieces_of_row) - pieces_of_row, pieces_of_row)
    return Stored(tokens_BT, used_B, samples, last, lengths, numbers.astype(np.int32))


def batches(stored: Stored, micro_batch_size: int) -> list[Batch]:
    """The rows in micro batches, which share memory; their number must be a multiple of `micro_batch_size`."""
    shape = stored.tokens_BT.shape
    tokens = stored.tokens_BT.astype(np.int64)
    labels = np.empty_like(tokens).reshape(-1)
    labels[:-1] = tokens.reshape(-1)[1:]
    labels[stored.last_P] = IGNORE
    labels = labels.reshape(shape)
    for row in np.flatnonzero(stored.used_B < shape[1]).tolist():
        labels[row, max(int(stored.used_B[row]) - 1, 0) :] = IGNORE
    positions = np.repeat(stored.last_P + 1 - stored.lengths_P, stored.lengths_P)
    np.subtract(np.arange(tokens.size), positions, out=positions)
    positions = positions.reshape(shape)
    documents = np.repeat(stored.numbers_P, stored.lengths_P).reshape(shape)
    starts = range(0, shape[0], micro_batch_size)
    return [
        Batch(
            tokens[start : start + micro_batch_size],
            labels[start : start + micro_batch_size],
            positions[start : start + micro_batch_size],
            documents[start : start + micro_batch_size],
            stored.samples.source[start : start + micro_batch_size],
            stored.samples.sample[start : start + micro_batch_size],
        )
        for start in starts
    ]
