"""The micro batches that the stream gives to training, as NumPy arrays. B sequences, T tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORE = -100
"""Label of a position without a target: padding, or the last token of a document's piece in a row."""


@dataclass(frozen=True)
class Batch:
    """One micro batch. `labels_BT[b, t]` is the token after `tokens_BT[b, t]` in the same document, or IGNORE."""

    tokens_BT: NDArray[np.int64]
    labels_BT: NDArray[np.int64]
    positions_BT: NDArray[np.int64]
    """Position in the document's piece, from 0."""
    documents_BT: NDArray[np.int32]
    """Number of the document within its row, from 0. Attention stays within equal numbers. Padding, at the end of a
    row, counts as one more document."""
    sources_B: NDArray[np.int32]
    """Index into the recipe's `data.sources`."""
    samples_B: NDArray[np.int64]
    """Global sample index: step * global_batch_size + position in the global batch. Padding rows have -1."""
