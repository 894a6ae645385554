"""Failures against published fleets, and the closed form against a simulation."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.plan.failures import (
    GPU_HOURS_PER_FAILURE,
    best_interval,
    expected_goodput,
    reliability,
    simulated_goodput,
)


def test_the_simulation_reproduces_llama_3_405b():
    """54 days on 16,384 GPUs: 419 unexpected interruptions, more than 90 % of the time training."""
    mean = GPU_HOURS_PER_FAILURE["llama3"] * 3600 / 16_384
    assert 54 * 86_400 / mean == pytest.approx(419)
    interval = best_interval(5.0, mean)
    goodput = simulated_goodput(interval, 5.0, 600.0, mean, intervals=200_000, seed=1)
    assert 0.90 < goodput < 0.95


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_rsc_1_has_the_mean_time_between_failures_that_was_published(gpus, hours):
    assert GPU_HOURS_PER_FAILURE["rsc-1"] / gpus == pytest.approx(hours, rel=0.03)


@pytest.mark.parametrize("mean", [3_000.0, 30_000.0, 300_000.0])
@pytest.mark.parametrize("restart", [60.0, 900.0])
def test_the_closed_form_is_what_a_simulation_gives(mean, restart):
    interval = best_interval(20.0, mean)
    expected = expected_goodput(interval, 20.0, restart, mean)
    simulated = simulated_goodput(interval, 20.0, restart, mean, intervals=100_000, seed=2)
    assert simulated == pytest.approx(expected, rel=0.02)


def test_the_best_interval_is_better_than_shorter_and_longer_ones():
    best = best_interval(30.0, 20_000.0)
    assert best == pytest.approx(math.sqrt(2 * 30 * 20_000), rel=0.1)
    goodput = expected_goodput(best, 30.0, 300.0, 20_000.0)
    assert goodput > expected_goodput(best / 1.5, 30.0, 300.0, 20_000.0)
    assert goodput > expected_goodput(best * 1.5, 30.0, 300.0, 20_000.0)


@given(
    gpus=st.integers(1, 1 << 20),
    hours=st.floats(1, 1e9),
    stall=st.floats(0.001, 1e4),
    save=st.floats(0, 1e5),
    restart=st.floats(0, 1e5),
)
def test_goodput_is_a_share_whatever_the_numbers(gpus, hours, stall, save, restart):
    found = reliability(gpus, hours, stall_seconds=stall, save_seconds=save, restart_seconds=restart)
    assert 0 <= found.goodput <= 1
    assert found.interval_seconds > 0
