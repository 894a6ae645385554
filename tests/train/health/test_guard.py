import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.config import GuardConfig
from train.errors import DivergedError
from train.exit_codes import FAILED_FOR_GOOD
from train.health.guard import Guard

CALM = [2.0 + 0.01 * (number % 7) for number in range(16)]


def after_calm(**settings: object) -> Guard:
    guard = Guard(GuardConfig.model_validate({"window": 16, **settings}))
    for data_step, value in enumerate(CALM):
        assert guard.judge(data_step, value, value / 2) == ("good", "")
    return guard


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_what_is_not_finite_is_always_skipped(loss: float, norm: float) -> None:
    for action in ("report", "skip", "rollback"):
        guard = after_calm(on_spike=action)
        verdict, why = guard.judge(16, loss, norm)
        assert verdict == "skip"
        assert "must be finite" in why


def test_a_loss_that_is_not_finite_moves_no_weights_whatever_the_norm() -> None:
    assert Guard(GuardConfig()).norm_limit(math.nan) < 0.0
    assert Guard(GuardConfig()).norm_limit(math.inf) < 0.0


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_spike_of_the_loss_moves_no_weights(action: str) -> None:
    guard = after_calm(on_spike=action)
    assert guard.norm_limit(9.0) < 0.0
    assert guard.judge(16, 9.0, 1.0)[0] == action


def test_a_spike_of_the_norm_is_above_the_limit_that_the_engine_gets() -> None:
    guard = after_calm(on_spike="skip")
    limit = guard.norm_limit(2.0)
    assert max(CALM) / 2 < limit < 5.0
    assert guard.judge(16, 2.0, math.nextafter(limit, math.inf)) == (
        "skip",
        f"gradient norm {limit:.4g} is above {limit:.4g}",
    )
    assert after_calm(on_spike="skip").judge(16, 2.0, limit) == ("good", "")


def test_a_reported_spike_is_trained_on_and_counts_as_good() -> None:
    guard = after_calm(on_spike="report", max_in_a_row=1)
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


def test_a_flat_curve_has_no_spikes_of_a_hair() -> None:
    guard = Guard(GuardConfig(window=16, on_spike="skip"))
    for data_step in range(16):
        guard.judge(data_step, 2.0, 1.0)
    assert guard.judge(16, 2.2, 1.1)[0] == "good"
    assert guard.judge(17, 2.5, 1.0)[0] == "skip"


def test_a_skipped_value_does_not_enter_the_window() -> None:
    guard = after_calm(on_spike="skip")
    before = guard.state()
    guard.judge(16, 9.0, 1.0)
    after = guard.state()
    assert (after["losses"], after["norms"]) == (before["losses"], before["norms"])
    assert after["bad_in_all"] == 1


def test_too_many_bad_steps_in_a_row_fail_the_run_for_good() -> None:
    guard = after_calm(max_in_a_row=2)
    guard.judge(16, math.nan, 1.0)
    guard.judge(17, math.nan, 1.0)
    with pytest.raises(
        DivergedError, match=r"bad step number 3 at data step 18 .*guard\.max_in_a_row \(2\)"
    ) as failure:
        guard.judge(18, math.nan, 1.0)
    assert failure.value.exit_code == FAILED_FOR_GOOD


def test_a_good_step_ends_the_row_but_not_the_sum() -> None:
    guard = after_calm(max_in_a_row=1, max_in_all=2)
    guard.judge(16, math.nan, 1.0)
    guard.judge(17, 2.0, 1.0)
    guard.judge(18, math.nan, 1.0)
    guard.judge(19, 2.0, 1.0)
    with pytest.raises(DivergedError, match=r"guard\.max_in_all \(2\)"):
        guard.judge(20, math.nan, 1.0)


def test_a_roll_back_keeps_what_was_found_bad_and_counted_but_not_the_windows() -> None:
    saved = after_calm().state()
    guard = Guard(GuardConfig(window=16, on_spike="rollback", max_in_all=2), saved)
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
def test_a_guard_that_was_saved_and_restored_judges_as_before(
    values: list[tuple[float, float]], cut: int, action: str
) -> None:
    config = GuardConfig.model_validate({"window": 8, "on_spike": action, "max_in_a_row": 99})
    whole, first = Guard(config), Guard(config)
    verdicts, resumed = [], []
    for data_step, (loss, norm) in enumerate(values):
        verdicts.append((whole.norm_limit(loss), whole.judge(data_step, loss, norm)))
        if data_step == cut:
            first = Guard(config, json.loads(json.dumps(first.state())))
        resumed.append((first.norm_limit(loss), first.judge(data_step, loss, norm)))
    assert resumed == verdicts
