"""What the stream hands to training: one micro batch as NumPy arrays. B sequences, T tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORE = -100
"""The label of a position without a target: padding, or the last token of a document's piece in a row."""


@dataclass(frozen=True)
class Batch:
    """`labels_BT[b, t]` is the token after `tokens_BT[b, t]` within the same document, or IGNORE."""

    tokens_BT: NDArray[np.int64]
    labels_BT: NDArray[np.int64]
    positions_BT: NDArray[np.int64]
    """Counted from 0 at each document's start in the row."""
    documents_BT: NDArray[np.int32]
    """The document's number within its row, from 0: attention stays within equal numbers. Padding, at the end of a
    row, is a document of its own with the next number."""
    sources_B: NDArray[np.int32]
    """Index into the recipe's `data.sources`."""
    samples_B: NDArray[np.int64]
    """Global sample index: step * global_batch_size + position in the global batch."""
