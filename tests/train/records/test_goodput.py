from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.records.goodput import ORDER, account, seconds_of_attempts


def started(attempt: int, time: float, uptime: float = 1.0, previous: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"kind": "started", "attempt": attempt, "time": time, "uptime": uptime, "previous": previous}


def event(kind: str, time: float, uptime: float, **details: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, "uptime": uptime, **details}


def spent(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(ORDER, 0.0) | seconds


def test_an_uninterrupted_run_is_fully_accounted_for() -> None:
    events = [
        started(1, 1001.0),
        event("booked", 1010.0, 10.0, step=1, seconds={"start": 4.0, "step": 6.0}),
        event("finished", 1020.0, 20.0, step=2, seconds={"data_wait": 1.0, "step": 7.0, "checkpoint_stall": 2.0}),
    ]
    result = account(events)
    assert result.seconds == spent(start=4.0, step=13.0, data_wait=1.0, checkpoint_stall=2.0)
    assert result.total == 20.0
    assert result.goodput == 13 / 20
    assert (result.attempts, result.kept_steps, result.lost_steps) == (1, 2, 0)


def test_work_after_the_checkpoint_that_a_run_resumes_from_is_lost_and_the_gap_is_down_time() -> None:
    events = [
        started(1, 1001.0),
        event("booked", 1010.0, 10.0, step=1, seconds={"start": 4.0, "step": 6.0}),
        started(2, 1031.0, previous={"attempt": 1, "step": 2, "uptime": 16.0}),
        event("resumed", 1032.0, 2.0, step=1),
        event("finished", 1038.0, 8.0, step=2, seconds={"start": 3.0, "step": 5.0}),
    ]
    result = account(events)
    assert result.seconds == spent(start=7.0, step=11.0, lost_work=6.0, down=14.0)
    assert (result.kept_steps, result.lost_steps) == (2, 1)


def test_entries_after_a_roll_back_to_an_earlier_step_are_lost() -> None:
    entries = [event("booked", 1000.0 + step, step, step=step, seconds={"step": 1.0}) for step in (1, 2, 3, 4)]
    events = [
        started(1, 1000.0, 0.0),
        *entries,
        event("resumed", 1004.0, 4.0, step=1),
        event("finished", 1005.0, 5.0, step=2, seconds={"step": 1.0}),
    ]
    result = account(events)
    assert result.seconds == spent(step=2.0, lost_work=3.0)
    assert (result.kept_steps, result.lost_steps) == (2, 3)


def test_a_checkpoint_that_turns_out_to_be_damaged_makes_booked_work_lost() -> None:
    events = [
        started(1, 1000.0, 0.0),
        event("booked", 1006.0, 6.0, step=1, seconds={"start": 1.0, "step": 5.0}),
        event("booked", 1011.0, 11.0, step=2, seconds={"step": 5.0}),
        started(2, 1011.0, 0.0),
        event("resumed", 1011.0, 0.0, step=1),
    ]
    result = account(events)
    assert result.seconds["lost_work"] == 5.0
    assert result.seconds["start"] == 1.0


def test_a_run_that_finds_no_checkpoint_starts_again_from_step_0() -> None:
    events = [
        started(1, 1000.0, 0.0),
        event("booked", 1006.0, 6.0, step=1, seconds={"start": 1.0, "step": 5.0}),
        started(2, 1006.0, 0.0),
        event("finished", 1012.0, 6.0, step=1, seconds={"start": 1.0, "step": 5.0}),
    ]
    result = account(events)
    assert result.seconds == spent(start=2.0, step=5.0, lost_work=5.0)
    assert (result.kept_steps, result.lost_steps) == (1, 1)


def test_a_start_that_is_stopped_before_its_first_step_loses_nothing() -> None:
    events = [
        started(1, 1000.0, 0.0),
        event("stopped", 1006.0, 6.0, step=1, seconds={"start": 1.0, "step": 5.0}),
        started(2, 1006.0, 0.0),
        event("stopped", 1008.0, 2.0, phase="start", seconds={"start": 2.0}),
    ]
    assert account(events).seconds == spent(start=3.0, step=5.0)


def test_time_in_a_hang_is_lost_work_and_an_attempt_without_a_step_is_start() -> None:
    events = [
        started(1, 1000.0, 0.0),
        event("booked", 1040.0, 40.0, step=1, seconds={"start": 10.0, "step": 30.0}),
        event("hang", 1100.0, 100.0),
        started(2, 1110.0, 0.0),
        event("resumed", 1115.0, 5.0, step=1),
        started(3, 1120.0, 0.0),
    ]
    assert account(events).seconds == spent(start=15.0, step=30.0, lost_work=60.0, down=15.0)


def test_time_since_the_last_entry_of_a_run_in_progress_counts_as_steps() -> None:
    events = [started(1, 1000.0, 0.0), event("booked", 1010.0, 10.0, step=1, seconds={"start": 4.0, "step": 6.0})]
    result = account(events, newest={"attempt": 1, "step": 3, "uptime": 18.0})
    assert result.seconds == spent(start=4.0, step=14.0)
    assert result.kept_steps == 3


def test_a_wall_clock_that_jumps_within_an_attempt_changes_nothing() -> None:
    events = [
        started(1, 1000.0, 0.0),
        event("booked", 1004.0, 4.0, step=1, seconds={"start": 1.0, "step": 3.0}),
        event("saved", 99000.0, 4.0),
    ]
    assert account(events).total == 4.0


def test_an_attempt_whose_start_a_full_disk_lost_does_not_stop_the_account() -> None:
    events = [
        event("booked", 1001.0, 1.0, step=1, seconds={"step": 1.0}),
        started(2, 1010.0, 0.0),
        event("booked", 1011.0, 1.0, step=1, seconds={"step": 1.0}),
    ]
    assert account(events).seconds == spent(step=1.0)


def test_a_run_without_events_has_no_goodput() -> None:
    assert account([]).goodput == 0.0


ATTEMPTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=6
)


@given(ATTEMPTS)
def test_the_account_sums_to_the_wall_clock(attempts: list[tuple[int, int, int, int]]) -> None:
    """Each attempt: the step it resumes from, the steps it finishes, how many of them it books, a pause."""
    events: list[dict[str, Any]] = []
    previous, now = None, 1000.0
    for number, (first, steps, booked, pause) in enumerate(attempts, 1):
        began = now
        events.append(started(number, began, 0.0, previous))
        events.append(event("resumed", began, 0.0, step=first))
        for step in range(1, steps + 1):
            now += 2.0
            if step <= booked:
                seconds = {"data_wait": 0.5, "step": 1.5}
                events.append(event("booked", now, now - began, step=first + step, seconds=seconds))
        previous = {"attempt": number, "step": first + steps, "uptime": now - began}
        now += pause
    events.append(started(len(attempts) + 1, now, 0.0, previous))
    result = account(events)
    assert result.total == pytest.approx(now - 1000.0)
    assert result.seconds["step"] == pytest.approx(1.5 * result.kept_steps)
    assert result.kept_steps + result.lost_steps == sum(steps for _, steps, booked, _ in attempts if booked)


def test_the_seconds_of_attempts_leave_out_the_time_between_them() -> None:
    events = [
        {"kind": "started", "uptime": 2.0, "time": 100.0},
        {"kind": "saved", "uptime": 30.0, "time": 128.0},
        {"kind": "started", "uptime": 3.0, "time": 900.0},
        {"kind": "failed", "uptime": 13.0, "time": 910.0},
        {"kind": "stop_requested", "time": 911.0},
    ]
    assert seconds_of_attempts(events) == 43.0
    assert seconds_of_attempts([]) == 0.0
