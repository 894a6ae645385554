import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.config import GuardConfig
from train.errors import DivergedError
from train.exit_codes import FAILED_FOR_GOOD
from train.health.guard import Guard

NORMAL = [2.0 + 0.01 * (number % 7) for number in range(16)]


def after_normal_steps(**settings: object) -> Guard:
    guard = Guard(GuardConfig.model_validate({"window": 16, **settings}))
    for data_step, value in enumerate(NORMAL):
        assert guard.judge(data_step, value, value / 2) == ("good", "")
    return guard


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_a_step_that_is_not_finite_is_always_skipped(loss: float, norm: float) -> None:
    for action in ("report", "skip", "rollback"):
        guard = after_normal_steps(on_spike=action)
        verdict, why = guard.judge(16, loss, norm)
        assert verdict == "skip"
        assert "must be finite" in why


def test_a_loss_that_is_not_finite_changes_no_weights_whatever_the_norm() -> None:
    assert Guard(GuardConfig()).norm_limit(math.nan) < 0.0
    assert Guard(GuardConfig()).norm_limit(math.inf) < 0.0


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_spike_of_the_loss_changes_no_weights(action: str) -> None:
    guard = after_normal_steps(on_spike=action)
    assert guard.norm_limit(9.0) < 0.0
    assert guard.judge(16, 9.0, 1.0)[0] == action


def test_a_spike_of_the_norm_is_above_the_limit_that_the_engine_gets() -> None:
    guard = after_normal_steps(on_spike="skip")
    limit = guard.norm_limit(2.0)
    assert max(NORMAL) / 2 < limit < 5.0
    assert guard.judge(16, 2.0, math.nextafter(limit, math.inf)) == (
        "skip",
        f"gradient norm {limit:.4g} is above {limit:.4g}",
    )
    assert after_normal_steps(on_spike="skip").judge(16, 2.0, limit) == ("good", "")


def test_a_reported_spike_is_trained_on_and_counts_as_good() -> None:
    guard = after_normal_steps(on_spike="report", max_consecutive_bad_steps=1)
    assert guard.norm_limit(9.0) == math.inf
    for data_step in range(16, 20):
        verdict, why = guard.judge(data_step, 99.0 * 3**data_step, 1.0)
        assert verdict == "report"
        assert why.startswith("loss ")


def test_nothing_is_a_spike_before_a_quarter_of_the_window() -> None:
    guard = Guard(GuardConfig(window=16, on_spike="skip"))
    for data_step in range(3):
        guard.judge(data_step, 2.0, 1.0)
    assert guard.judge(3, 1e9, 1e9)[0] == "good"


def test_tiny_changes_of_a_flat_curve_are_no_spikes() -> None:
    guard = Guard(GuardConfig(window=16, on_spike="skip"))
    for data_step in range(16):
        guard.judge(data_step, 2.0, 1.0)
    assert guard.judge(16, 2.2, 1.1)[0] == "good"
    assert guard.judge(17, 2.5, 1.0)[0] == "skip"


def test_a_skipped_value_does_not_enter_the_window() -> None:
    guard = after_normal_steps(on_spike="skip")
    before = guard.state()
    guard.judge(16, 9.0, 1.0)
    after = guard.state()
    assert (after["losses"], after["norms"]) == (before["losses"], before["norms"])
    assert after["bad_in_all"] == 1


def test_too_many_consecutive_bad_steps_fail_the_run_for_good() -> None:
    guard = after_normal_steps(max_consecutive_bad_steps=2)
    guard.judge(16, math.nan, 1.0)
    guard.judge(17, math.nan, 1.0)
    with pytest.raises(
        DivergedError, match=r"bad step number 3 at data step 18 .*guard\.max_consecutive_bad_steps \(2\)"
    ) as failure:
        guard.judge(18, math.nan, 1.0)
    assert failure.value.exit_code == FAILED_FOR_GOOD


def test_a_good_step_resets_the_consecutive_count_but_not_the_total() -> None:
    guard = after_normal_steps(max_consecutive_bad_steps=1, max_bad_steps=2)
    guard.judge(16, math.nan, 1.0)
    guard.judge(17, 2.0, 1.0)
    guard.judge(18, math.nan, 1.0)
    guard.judge(19, 2.0, 1.0)
    with pytest.raises(DivergedError, match=r"guard\.max_bad_steps \(2\)"):
        guard.judge(20, math.nan, 1.0)


def test_a_rollback_restores_the_windows_but_keeps_the_counts_and_the_batches_to_skip() -> None:
    saved = after_normal_steps().state()
    guard = Guard(GuardConfig(window=16, on_spike="rollback", max_bad_steps=2), saved)
    guard.judge(16, 2.01, 1.0)
    assert guard.judge(17, 9.0, 1.0)[0] == "rollback"
    guard.roll_back(saved)
    assert guard.data_steps_to_skip == {17}
    assert guard.state()["losses"] == saved["losses"]
    assert guard.state()["bad_in_all"] == 1


@given(
    st.lists(st.tuples(st.floats(0.1, 20.0), st.floats(0.01, 50.0)), min_size=12, max_size=60),
    st.integers(0, 59),
    st.sampled_from(["report", "skip"]),
)
def test_a_guard_that_was_saved_and_restored_decides_as_before(
    values: list[tuple[float, float]], cut: int, action: str
) -> None:
    config = GuardConfig.model_validate({"window": 8, "on_spike": action, "max_consecutive_bad_steps": 99})
    uninterrupted, guard = Guard(config), Guard(config)
    expected, resumed = [], []
    for data_step, (loss, norm) in enumerate(values):
        expected.append((uninterrupted.norm_limit(loss), uninterrupted.judge(data_step, loss, norm)))
        if data_step == cut:
            guard = Guard(config, json.loads(json.dumps(guard.state())))
        resumed.append((guard.norm_limit(loss), guard.judge(data_step, loss, norm)))
    assert resumed == expected


def test_gradients_of_zeros_are_reported_and_several_in_a_row_end_the_run() -> None:
    for action in ("report", "skip", "rollback"):
        guard = after_normal_steps(on_spike=action)
        for data_step in (16, 17):
            verdict, why = guard.judge(data_step, 6.24, 0.0)
            assert verdict == "report"
            assert why == "the gradient norm is 0, so the model does not learn (loss 6.24)"
        with pytest.raises(DivergedError, match=r"the model is dead: .* in 3 steps in a row, up to data step 18"):
            guard.judge(18, 6.24, 0.0)


def test_a_step_that_learns_ends_a_row_of_zeros_and_a_resume_does_not() -> None:
    guard = after_normal_steps()
    guard.judge(16, 2.0, 0.0)
    guard.judge(17, 2.0, 0.0)
    assert guard.judge(18, 2.0, 1.0)[0] == "good"
    guard.judge(19, 2.0, 0.0)
    guard.judge(20, 2.0, 0.0)
    resumed = Guard(GuardConfig(window=16), json.loads(json.dumps(guard.state())))
    with pytest.raises(DivergedError, match="3 steps in a row"):
        resumed.judge(21, 2.0, 0.0)
