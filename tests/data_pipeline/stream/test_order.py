import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.stream.order import FEW_BLOCKS, hash_of, locate_rows, permute, source_order


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_a_permutation_gives_every_value_once(size: int, key: int) -> None:
    out = permute(np.arange(size), size, np.full(size, key, np.uint64))
    assert np.array_equal(np.sort(out), np.arange(size))


def test_different_keys_permute_differently() -> None:
    values = np.arange(1000)
    one, other = (permute(values, 1000, np.full(1000, key, np.uint64)) for key in (1, 2))
    assert (one == other).sum() < 20
    assert (one == values).sum() < 20


def test_the_order_is_the_same_in_every_release() -> None:
    values = np.arange(8)
    assert permute(values, 8, np.full(8, 7, np.uint64)).tolist() == PINNED_PERMUTATION
    assert hash_of(1, 2, 3) == PINNED_HASH


PINNED_PERMUTATION = [6, 7, 2, 0, 4, 5, 1, 3]
PINNED_HASH = 0xE6534AC8E0FCC739


def test_every_pair_of_seed_and_epoch_has_its_own_hash() -> None:
    assert len({hash_of(seed, epoch) for seed in range(30) for epoch in range(30)}) == 900


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 4000), block_rows=st.integers(1, 40), key=st.integers(0, 2**64 - 1))
def test_every_row_comes_exactly_once_in_every_epoch(rows: int, block_rows: int, key: int) -> None:
    order = source_order(rows, block_rows)
    samples = np.arange(3 * rows + order.lanes * order.window_slots)
    located = locate_rows(order, key, samples // order.lanes, samples % order.lanes)
    for epoch in (0, 1):
        seen = np.bincount(located.row[located.epoch == epoch], minlength=rows)
        assert seen.tolist() == [1] * rows


def test_the_epochs_of_a_source_of_few_blocks_do_not_mix() -> None:
    order = source_order(100, 10)
    samples = np.arange(300)
    located = locate_rows(order, 1, samples // order.lanes, samples % order.lanes)
    assert located.epoch.tolist() == [0] * 100 + [1] * 100 + [2] * 100
    assert located.row[:100].tolist() != located.row[100:200].tolist()


@pytest.mark.parametrize("short", [0, 1, 3])
def test_a_lane_opens_few_blocks_at_a_time(short: int) -> None:
    """A lane needs no more blocks in one window than the window has, except where an epoch ends."""
    order = source_order(8 * FEW_BLOCKS * 5 - short, 8)
    samples = np.arange(960 * 200)
    located = locate_rows(order, 1, samples // order.lanes, samples % order.lanes)
    assert order.lanes == 5
    pairs = np.unique(np.stack([located.lane, located.window, located.row // 8]), axis=1)
    windows, blocks = np.unique(pairs[:2], axis=1, return_counts=True)
    assert np.median(blocks) == order.window_blocks
    assert (blocks > order.window_blocks).sum() <= 0.2 * windows.shape[1]


def test_ranks_that_divide_the_lanes_share_no_block_within_an_epoch() -> None:
    order = source_order(8 * FEW_BLOCKS * 8, 8)
    samples = np.arange(order.rows)
    located = locate_rows(order, 1, samples // order.lanes, samples % order.lanes)
    ranks_of_block = np.unique(
        np.stack([located.row[located.epoch == 0] // 8, samples[located.epoch == 0] % 4]), axis=1
    )
    assert order.lanes == 8
    assert len(np.unique(ranks_of_block[0])) == ranks_of_block.shape[1]


def test_any_sample_is_located_without_a_replay() -> None:
    order = source_order(10**9, 128)
    far = np.arange(10**12, 10**12 + 50)
    together = locate_rows(order, 3, far // order.lanes, far % order.lanes)
    alone = [
        locate_rows(order, 3, far[i : i + 1] // order.lanes, far[i : i + 1] % order.lanes).row[0] for i in range(50)
    ]
    assert together.row.tolist() == alone
