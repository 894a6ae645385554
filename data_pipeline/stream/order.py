"""Which row of a source is its n-th sample: a pure function, so that nothing is saved, replayed or set up.

A source is an endless sequence of *slots*, of which each epoch takes `rows`. Slots come in blocks of `block_rows` and
are dealt to `lanes` in turn; a lane shuffles the slots of `window_blocks` blocks at a time, so that few blocks are open
at once, and which stored block stands behind a slot's block is a permutation of the epoch. Every row is seen exactly
once in each epoch; at an epoch's end the lanes, which are a window wide, mix it with the next one. A source of few
blocks is one block in one lane: its epochs do not mix.

What the lanes of a source are to the samples is the mixture's business (mixture.py): here a sample is the n-th of a
lane.

Permutations are Feistel networks keyed by a hash, with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002). The hash is spelled out here because NumPy's generators may change between releases.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LANES = 960
"""Lanes of the global sample index. It has many divisors, so most numbers of ranks own whole lanes."""
WINDOW_BLOCKS = 4
FEW_BLOCKS = 16 * WINDOW_BLOCKS
"""Below this, and for each lane, a window would be too large a part of the epoch."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_ROUNDS = 6

Indices = NDArray[np.int64]
Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class SourceOrder:
    """How the rows of one source are cut into blocks and lanes for shuffling."""

    rows: int
    block_rows: int
    blocks: int
    window_blocks: int
    lanes: int

    @property
    def window_slots(self) -> int:
        return self.window_blocks * self.block_rows


@dataclass(frozen=True)
class Placed:
    """Where the n-th samples of a source are. All arrays have the length of n."""

    epoch: Indices
    row: Indices
    lane: Indices
    window: Indices


def source_order(rows: int, block_rows: int) -> SourceOrder:
    """The order's blocks are the stored ones, unless these are few."""
    blocks = -(-rows // block_rows)
    if blocks < FEW_BLOCKS:
        return SourceOrder(rows, rows, 1, 1, 1)
    most = max(1, blocks // FEW_BLOCKS)
    lanes = max(n for n in range(1, LANES + 1) if LANES % n == 0 and n <= most)
    return SourceOrder(rows, block_rows, blocks, WINDOW_BLOCKS, lanes)


def hash_of(*parts: int) -> int:
    """A 64-bit hash of integers and of their order."""
    state = 0x243F6A8885A308D3
    for part in parts:
        state = (state ^ (part & _MASK)) * _GOLDEN & _MASK
        state ^= state >> 29
        state = state * 0xBF58476D1CE4E5B9 & _MASK
        state ^= state >> 32
    return state


def mix(values: Keys) -> Keys:
    """Each 64-bit value to another, one to one."""
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


def place(order: SourceOrder, key: int, ordinals: Indices, lanes: Indices) -> Placed:
    """The rows of samples number `ordinals` of the source's lanes `lanes` (0 to order.lanes - 1)."""
    window, slot = np.divmod(ordinals, order.window_slots)
    window_keys = mix((window * order.lanes + lanes).astype(np.uint64) + np.uint64(hash_of(key, 0)))
    slot = permute(slot, order.window_slots, window_keys)
    block, offset = np.divmod(slot, order.block_rows)
    slot = ((window * order.window_blocks + block) * order.lanes + lanes) * order.block_rows + offset
    epoch, row = _row_of_slot(order, key, slot)
    return Placed(epoch, row, lanes, window)


def _row_of_slot(order: SourceOrder, key: int, slots: Indices) -> tuple[Indices, Indices]:
    epoch, place_in_epoch = np.divmod(slots, order.rows)
    if order.blocks == 1:
        return epoch, place_in_epoch
    # Rotated so that within the epoch the slots' blocks are whole blocks of rows, whatever `rows` is.
    rotation = (-epoch * order.rows) % order.block_rows
    place_in_epoch = (place_in_epoch - rotation) % order.rows
    keys = mix(epoch.astype(np.uint64) + np.uint64(hash_of(key, 1)))
    row = _shuffle_blocks(order, place_in_epoch, keys)
    beyond = np.flatnonzero(row >= order.rows)  # rows that the last, short block does not have: walk on
    while beyond.size:
        walked = _shuffle_blocks(order, row[beyond], keys[beyond])
        row[beyond] = walked
        beyond = beyond[walked >= order.rows]
    return epoch, row


def _shuffle_blocks(order: SourceOrder, rows: Indices, keys: Keys) -> Indices:
    block, offset = np.divmod(rows, order.block_rows)
    return permute(block, order.blocks, keys) * order.block_rows + offset
