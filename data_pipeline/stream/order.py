"""The order of one source's rows: a pure function from the number of a sample to a row. Nothing is saved or replayed.

A source is an endless sequence of *slots*; each epoch takes `rows` of them. Slots form blocks of `block_rows`, and
these blocks are dealt to `lanes` in turn. A lane shuffles the slots of a *window* of `window_blocks` blocks at a time,
so that few blocks are open together. A permutation of the epoch maps the blocks of slots to the stored blocks. Every
row comes exactly once in each epoch. Where an epoch ends, a window mixes its rows with those of the next epoch. A
source of few blocks is treated as one block in one lane, and its epochs do not mix.

This module knows only the n-th sample of a lane. How global samples map to lanes is decided in mixture.py.

Permutations are Feistel networks keyed by a hash, with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002). The hash is implemented here because NumPy's generators may change between releases.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LANES = 960
"""Lanes of the global sample index. It has many divisors, so most numbers of ranks own whole lanes."""
WINDOW_BLOCKS = 4
FEW_BLOCKS = 16 * WINDOW_BLOCKS
"""Fewest blocks of a source, and of each lane. With fewer, a window would be too large a part of the epoch."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_ROUNDS = 6

Indices = NDArray[np.int64]
Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class SourceOrder:
    """How the rows of one source are divided into blocks and lanes for shuffling."""

    rows: int
    block_rows: int
    """Rows per block."""
    blocks: int
    window_blocks: int
    """Blocks that a lane shuffles together."""
    lanes: int
    """Lanes of the source, a divisor of LANES."""

    @property
    def window_slots(self) -> int:
        """Slots in a window."""
        return self.window_blocks * self.block_rows


@dataclass(frozen=True)
class LocatedRows:
    """The rows of some samples of a source. All arrays have the shape (samples,)."""

    epoch: Indices
    row: Indices
    lane: Indices
    window: Indices
    """Number of the window in the lane."""


def source_order(rows: int, block_rows: int) -> SourceOrder:
    """The order of a source. Its blocks are the stored blocks, unless there are few of them."""
    blocks = -(-rows // block_rows)
    if blocks < FEW_BLOCKS:
        return SourceOrder(rows, rows, 1, 1, 1)
    most = max(1, blocks // FEW_BLOCKS)
    lanes = max(n for n in range(1, LANES + 1) if LANES % n == 0 and n <= most)
    return SourceOrder(rows, block_rows, blocks, WINDOW_BLOCKS, lanes)


def hash_of(*parts: int) -> int:
    """A 64-bit hash of integers, which depends on their order."""
    state = 0x243F6A8885A308D3
    for part in parts:
        state = (state ^ (part & _MASK)) * _GOLDEN & _MASK
        state ^= state >> 29
        state = state * 0xBF58476D1CE4E5B9 & _MASK
        state ^= state >> 32
    return state


def mix(values: Keys) -> Keys:
    """A one-to-one hash of each 64-bit value."""
    values = values ^ (values >> np.uint64(29))
    values *= _MULTIPLIER
    values ^= values >> np.uint64(32)
    values *= np.uint64(_GOLDEN)
    return values ^ (values >> np.uint64(29))


def permute(values: Indices, size: int, keys: Keys) -> Indices:
    """Each value in [0, size) under the permutation of its key. `keys` has the shape of `values`."""
    if size == 1:
        return np.zeros_like(values)
    half = ((size - 1).bit_length() + 1) // 2
    out = _feistel(values.astype(np.uint64), half, keys)
    outside = np.flatnonzero(out >= np.uint64(size))
    while outside.size:
        walked = _feistel(out[outside], half, keys[outside])
        out[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return out.astype(np.int64)


def _feistel(values: Keys, half: int, keys: Keys) -> Keys:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for number in range(_ROUNDS):
        round_key = np.uint64((number + 1) * _GOLDEN & _MASK)
        left, right = right, left ^ ((mix((right ^ keys) + round_key) >> np.uint64(17)) & mask)
    return (left << shift) | right


def locate_rows(order: SourceOrder, key: int, ordinals: Indices, lanes: Indices) -> LocatedRows:
    """The rows of samples number `ordinals` of the source's lanes `lanes` (0 to order.lanes - 1)."""
    window, slot = np.divmod(ordinals, order.window_slots)
    window_keys = mix((window * order.lanes + lanes).astype(np.uint64) + np.uint64(hash_of(key, 0)))
    slot = permute(slot, order.window_slots, window_keys)
    block, offset = np.divmod(slot, order.block_rows)
    slot = ((window * order.window_blocks + block) * order.lanes + lanes) * order.block_rows + offset
    epoch, row = _row_of_slot(order, key, slot)
    return LocatedRows(epoch, row, lanes, window)


def _row_of_slot(order: SourceOrder, key: int, slots: Indices) -> tuple[Indices, Indices]:
    """Epoch and row of each slot."""
    epoch, position = np.divmod(slots, order.rows)
    if order.blocks == 1:
        return epoch, position
    # Rotated, so that within the epoch the blocks of slots are whole blocks of rows for any number of rows.
    rotation = (-epoch * order.rows) % order.block_rows
    position = (position - rotation) % order.rows
    keys = mix(epoch.astype(np.uint64) + np.uint64(hash_of(key, 1)))
    row = _shuffle_blocks(order, position, keys)
    beyond = np.flatnonzero(row >= order.rows)  # rows that the last, short block lacks: walk the cycle
    while beyond.size:
        walked = _shuffle_blocks(order, row[beyond], keys[beyond])
        row[beyond] = walked
        beyond = beyond[walked >= order.rows]
    return epoch, row


def _shuffle_blocks(order: SourceOrder, rows: Indices, keys: Keys) -> Indices:
    block, offset = np.divmod(rows, order.block_rows)
    return permute(block, order.blocks, keys) * order.block_rows + offset
