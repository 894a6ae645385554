"""Packs documents into rows of L tokens, by best fit or by concatenation. Only the lengths of documents are needed.

Best fit cuts only documents longer than a row. Their full pieces fill rows of their own. The remainders are packed with
the other documents, longest first, each into the row where it leaves the least room. This is best-fit decreasing on the
histogram of lengths (Ding et al., "Fewer truncations improve language modeling", arXiv 2404.10830). Concatenation joins
all documents and cuts every L tokens.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Packing = Literal["best-fit", "concatenate"]


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents in the order of the rows. Row i has the pieces row_start[i] to row_start[i + 1] - 1."""

    document: NDArray[np.int64]
    """Index of the document in the list of lengths. Shape (pieces,)."""
    offset: NDArray[np.int64]
    """First token of the document in the piece. Shape (pieces,)."""
    length: NDArray[np.int64]
    """Tokens in the piece. Shape (pieces,)."""
    row_start: NDArray[np.int64]
    """First piece of each row, and the number of pieces. Shape (rows + 1,)."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.row_start) - 1


def pack(lengths: NDArray[np.int64], row_tokens: int, packing: Packing) -> Pieces:
    """Rows that contain every token of every document exactly once. All lengths must be above 0."""
    match packing:
        case "best-fit":
            document, offset, length, row = _best_fit(lengths, row_tokens)
        case "concatenate":
            document, offset, length, row = _concatenate(lengths, row_tokens)
    rows = int(row[-1]) + 1 if len(row) else 0
    return Pieces(document, offset, length, np.searchsorted(row, np.arange(rows + 1)))


def _concatenate(lengths: NDArray[np.int64], row_tokens: int) -> tuple[NDArray[np.int64], ...]:
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(np.concatenate([[0], ends]), np.arange(0, total, row_tokens))
    starts, length = cuts[:-1], np.diff(cuts)
    document = np.searchsorted(ends, starts, side="right")
    return document, starts - (ends - lengths)[document], length, starts // row_tokens


def _best_fit(lengths: NDArray[np.int64], row_tokens: int) -> tuple[NDArray[np.int64], ...]:
    full = lengths // row_tokens
    full_document = np.repeat(np.arange(len(lengths)), full)
    full_offset = (np.arange(len(full_document)) - np.repeat(np.cumsum(full) - full, full)) * row_tokens
    rest = lengths % row_tokens
    rest_document = np.flatnonzero(rest)
    bins = _best_fit_bins(rest[rest_document], row_tokens)
    document = np.concatenate([full_document, rest_document])
    offset = np.concatenate([full_offset, (full * row_tokens)[rest_document]])
    length = np.concatenate([np.full(len(full_document), row_tokens), rest[rest_document]])
    row = np.concatenate([np.arange(len(full_document)), len(full_document) + bins])
    # Rows are sorted by their first document, so that neighbours in the input stay neighbours. Shuffling is the task of
    # the training order.
    first = np.full(int(row.max(initial=-1)) + 1, len(lengths))
    np.minimum.at(first, row, document)
    new_number = np.empty_like(first)
    new_number[np.argsort(first, kind="stable")] = np.arange(len(first))
    row = new_number[row]
    order = np.lexsort((offset, document, row))
    return document[order], offset[order], length[order], row[order]


def _best_fit_bins(lengths: NDArray[np.int64], row_tokens: int) -> NDArray[np.int64]:
    """The bin of each item. Items of one length are packed together, because bins with equal room are equivalent."""
    by_length = np.argsort(-lengths, kind="stable")
    out = np.empty(len(lengths), np.int64)
    room: dict[int, list[NDArray[np.int64]]] = {}  # room left -> bins
    rooms = 0  # bit r is set if a bin has room r
    bins = 0
    position = 0
    values, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            fitting = rooms >> length
            if fitting:
                left = length + (fitting & -fitting).bit_length() - 1
                chosen = room[left].pop()
                if not room[left]:
                    rooms ^= 1 << left
                if len(chosen) > count:
                    room[left].append(chosen[count:])
                    rooms |= 1 << left
                    chosen = chosen[:count]
            else:
                left = row_tokens
                opened = -(-count // (row_tokens // length))
                chosen = np.arange(bins, bins + opened)
                bins += opened
            out[by_length[position : position + len(chosen)]] = chosen
            position += len(chosen)
            count -= len(chosen)
            if left > length:
                room.setdefault(left - length, []).append(chosen)
                rooms |= 1 << (left - length)
    return out
