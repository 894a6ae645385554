"""The learning rate has the published values and is a function of the step, so a resume cannot change it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.optim.config import OptimConfig
from train.optim.schedule import learning_rate

COSINE = OptimConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=4)


def test_cosine_has_the_published_values() -> None:
    rates = [learning_rate(step, 10, COSINE) for step in range(1, 11)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 0.9397, 0.775, 0.55, 0.325, 0.1603, 0.1], abs=5e-5)


def test_wsd_warms_up_is_constant_and_decays_linearly() -> None:
    config = COSINE.model_copy(update={"schedule": "wsd", "decay_steps": 4})
    rates = [learning_rate(step, 12, config) for step in range(1, 13)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1])


@given(
    total=st.integers(2, 300),
    warmup=st.integers(0, 200),
    schedule=st.sampled_from(["cosine", "wsd"]),
    lowest=st.floats(0, 1),
)
def test_every_schedule_warms_up_to_the_peak_and_never_rises_after(
    total: int, warmup: int, schedule: str, lowest: float
) -> None:
    warmup = min(warmup, total - 1)
    config = OptimConfig.model_validate(
        {"lr": 2.0, "warmup_steps": warmup, "schedule": schedule, "min_lr_ratio": lowest}
    )
    rates = [learning_rate(step, total, config) for step in range(1, total + 3)]
    assert rates[0] > 0 or (total == 1 + warmup and lowest == 0)
    assert max(rates) <= 2.0
    if warmup:
        assert rates[warmup - 1] == 2.0
    after = rates[warmup:]
    assert all(a >= b for a, b in pairwise(after))
    assert rates[total - 1] == rates[total] == rates[total + 1] == pytest.approx(2.0 * lowest)
