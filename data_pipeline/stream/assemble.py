"""Assembles stored rows into batches. B rows, T tokens, P pieces of documents.

All arrays are made for many rows together, because a single micro batch can be so small that the calls cost more than
the work.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.shards.shard_file import Rows
from data_pipeline.stream.batch import IGNORE, Batch
from data_pipeline.stream.mixture import Samples


@dataclass(frozen=True)
class Stored:
    """Rows as stored, and the pieces in them. A piece ends at the end of its row at the latest."""

    tokens_BT: Rows
    used_B: NDArray[np.int64]
    """Tokens in use."""
    samples: Samples
    last_P: NDArray[np.int64]
    """Position of each piece's last token in the flattened rows."""
    lengths_P: NDArray[np.int64]
    numbers_P: NDArray[np.int32]
    """Number of the piece within its row, from 0."""


def find_pieces(tokens_BT: Rows, used_B: NDArray[np.int64], end_of_document: int, samples: Samples) -> Stored:
    """Finds the pieces: a piece ends with `end_of_document` or with its row. From `used_B[b]` on, a row is padding."""
    width = tokens_BT.shape[1]
    ends_BT = tokens_BT == end_of_document
    for row in np.flatnonzero(used_B < width).tolist():
        used = int(used_B[row])
        ends_BT[row, used:] = False
        ends_BT[row, max(used - 1, 0)] |= used > 0  # the padding is a piece of its own
    ends_BT[:, -1] = True
    last = np.flatnonzero(ends_BT)
    lengths = last.copy()
    lengths[1:] -= last[:-1]
    lengths[0] += 1
    pieces_of_row = np.bincount(last // width)
    numbers = np.arange(len(last)) - np.repeat(np.cumsum(pieces_of_row) - pieces_of_row, pieces_of_row)
    return Stored(tokens_BT, used_B, samples, last, lengths, numbers.astype(np.int32))


def batches(stored: Stored, micro_batch_size: int) -> list[Batch]:
    """The rows as micro batches, which share memory. The number of rows must be a multiple of `micro_batch_size`."""
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
