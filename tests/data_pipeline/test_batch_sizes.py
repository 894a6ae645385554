"""Planned batch sizes as pure functions of the step, and what a resume makes of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.batch_sizes import BatchSizes, next_change, value_at

CHANGES = ((4, 6), (10, 12))
PLANNED = BatchSizes.of(3, changes=CHANGES)


def test_each_step_has_the_size_of_the_last_change_and_begins_where_the_one_before_ended() -> None:
    assert [PLANNED.size(step) for step in (0, 3, 4, 9, 10, 99)] == [3, 3, 6, 6, 12, 12]
    for step in range(30):
        assert PLANNED.first_sample(step + 1) - PLANNED.first_sample(step) == PLANNED.size(step)
    assert (value_at(PLANNED.log, 4), next_change(CHANGES, 4), next_change(CHANGES, 10)) == (6, 10, None)


@given(samples=st.integers(0, 400))
def test_steps_for_is_the_fewest_steps_with_so_many_samples(samples: int) -> None:
    steps = PLANNED.steps_for(samples)
    assert PLANNED.first_sample(steps) >= samples
    assert steps == 0 or PLANNED.first_sample(steps - 1) < samples


@pytest.mark.parametrize("step", [1, 3, 4, 5, 10, 20])
def test_a_resume_has_the_sizes_of_the_uninterrupted_run(step: int) -> None:
    saved = {"step": step, "global_batch_size": PLANNED.size(step), "batch_sizes": PLANNED.as_json(step)}
    again = BatchSizes.of(3, saved, CHANGES)
    assert [again.first_sample(n) for n in range(40)] == [PLANNED.first_sample(n) for n in range(40)]


def test_the_past_stays_whatever_is_planned_now() -> None:
    saved = {"step": 7, "global_batch_size": 6, "batch_sizes": [[0, 3], [4, 6]]}
    assert BatchSizes.of(9, saved).log == ((0, 3), (4, 6), (7, 9))
    assert BatchSizes.of(3, saved, ((2, 6), (8, 5))).log == ((0, 3), (4, 6), (8, 5))
    assert BatchSizes.of(3, {"step": 7, "global_batch_size": 3}, ((8, 5),)).log == ((0, 3), (8, 5))
