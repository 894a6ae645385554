import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.stream.mixture import PERIOD, counts_before, first_phase, locate, next_phase, quantise
from data_pipeline.stream.order import LANES, source_order

ORDERS = [source_order(240, 4), source_order(64, 4), source_order(7, 4)]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_counts_add_up_to_the_period_and_are_near_the_weights(weights: list[float]) -> None:
    counts = quantise(weights, PERIOD)
    assert counts.sum() == PERIOD
    assert np.abs(counts - np.array(weights) / sum(weights) * PERIOD).max() <= 1


def test_a_weight_that_is_too_small_is_refused() -> None:
    with pytest.raises(DataError, match=r"data.sources\[1\].weight \(1e-06\) is less than 1/65536 of all weights"):
        first_phase([1.0, 1e-6])


def test_every_batch_is_closer_to_the_weights_than_by_chance() -> None:
    weights = [0.6, 0.35, 0.05]
    located = locate([first_phase(weights)], ORDERS, 1, np.arange(512 * 200))
    shares = np.stack([np.bincount(batch, minlength=3) / 512 for batch in located.source.reshape(200, 512)])
    by_chance = np.sqrt(np.array(weights) * (1 - np.array(weights)) / 512)
    assert np.abs(shares.mean(0) - weights).max() < 1e-3
    assert (shares.std(0) < by_chance / 3).all()


changes = st.lists(
    st.tuples(st.integers(1, 4000), st.tuples(*[st.integers(1, 9)] * 3)), max_size=4, unique_by=lambda change: change[0]
)


@settings(max_examples=15, deadline=None)
@given(changes=changes, seed=st.integers(0, 2**32))
def test_changes_of_weights_lose_and_repeat_no_row(changes: list, seed: int) -> None:
    phases = [first_phase([3, 2, 1])]
    for sample, weights in sorted(changes):
        phases.append(next_phase(phases[-1], sample, weights))
    located = locate(phases, ORDERS, seed, np.arange(6_000))
    for source, order in enumerate(ORDERS):
        keys = (located.epoch * order.rows + located.row)[located.source == source]
        assert len(np.unique(keys)) == len(keys)
        assert (np.diff(located.epoch[located.source == source]) >= 0).all()
        assert (np.bincount(located.epoch[located.source == source])[:-1] == order.rows).all()


@given(first=st.integers(1, 5000), sample=st.integers(0, 5000))
def test_counts_equal_those_of_a_walk(first: int, sample: int) -> None:
    phases = [first_phase([3, 2, 1])]
    if sample >= first:
        phases.append(next_phase(phases[0], first, [1, 1, 5]))
    located = locate(phases, ORDERS, 1, np.arange(sample))
    walked = np.zeros((3, LANES), np.int64)
    np.add.at(walked, (located.source, located.sample % LANES), 1)
    assert np.array_equal(counts_before(phases[-1], sample), walked)


def test_a_source_of_many_lanes_gives_every_row_once_in_an_epoch() -> None:
    orders = [source_order(8 * 64 * 30, 8), *ORDERS]
    assert orders[0].lanes == 30
    phases = [first_phase([9, 1, 1, 1])]
    phases.append(next_phase(phases[0], 7_777, [9, 2, 1, 1]))
    located = locate(phases, orders, 1, np.arange(60_000))
    rows, epochs = located.row[located.source == 0], located.epoch[located.source == 0]
    assert np.bincount(rows[epochs == 0], minlength=orders[0].rows).tolist() == [1] * orders[0].rows
    assert np.bincount(rows[epochs == 1]).max() == 1


def test_locating_some_samples_gives_the_same_as_locating_all() -> None:
    phases = [first_phase([3, 2, 1])]
    phases.append(next_phase(phases[0], 5_000, [1, 1, 1]))
    whole = locate(phases, ORDERS, 9, np.arange(20_000))
    some = np.random.default_rng(0).permutation(20_000)[:500]
    part = locate(phases, ORDERS, 9, some)
    for name in ("sample", "source", "epoch", "row", "lane", "window"):
        assert np.array_equal(getattr(part, name), getattr(whole, name)[some])
