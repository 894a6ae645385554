from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.records.goodput import ORDER, account, unsettled


def started(attempt: int, time: float, uptime: float = 1.0) -> dict[str, Any]:
    return {"kind": "started", "attempt": attempt, "time": time, "uptime": uptime}


def record(attempt: int, number: int, /, **seconds: float) -> dict[str, Any]:
    return {"attempt": attempt, "step": number, "seconds": seconds}


def test_an_undisturbed_run_is_all_accounted_for() -> None:
    events = [
        started(1, 1001.0),
        {"kind": "finished", "time": 1020.0, "uptime": 20.0, "seconds": {"checkpoint_stall": 2.0}},
    ]
    records = [record(1, 1, start=4.0, step=6.0), record(1, 2, data_wait=1.0, step=7.0)]
    spent = account(events, records)
    assert spent.seconds == dict.fromkeys(ORDER, 0.0) | {
        "start": 4.0, "step": 13.0, "data_wait": 1.0, "checkpoint_stall": 2.0,
    }  # fmt: skip
    assert spent.total == 20.0
    assert spent.goodput == 13 / 20
    assert (spent.attempts, spent.kept_steps, spent.lost_steps) == (1, 2, 0)


def test_steps_that_were_trained_again_are_lost_work_and_the_gap_is_down_time() -> None:
    events = [started(1, 1001.0), started(2, 1031.0)]
    records = [
        record(1, 1, start=4.0, step=6.0),
        record(1, 2, step=5.0, data_wait=1.0),
        record(2, 2, start=3.0, step=5.0),
    ]
    spent = account(events, records)
    assert spent.seconds["lost_work"] == 6.0
    assert spent.seconds["start"] == 7.0
    assert spent.seconds["step"] == 11.0
    assert spent.seconds["down"] == 30.0 - 16.0
    assert (spent.kept_steps, spent.lost_steps) == (2, 1)


def test_a_step_after_a_roll_back_to_before_it_loses_all_later_steps() -> None:
    records = [record(1, step, step=1.0) for step in (1, 2, 3, 4, 2)]
    spent = account([started(1, 0.0, 0.0)], records)
    assert (spent.kept_steps, spent.lost_steps) == (2, 3)


def test_time_in_a_hang_is_lost_work_and_an_attempt_without_a_step_is_start() -> None:
    events = [
        started(1, 1000.0, 0.0),
        {"kind": "hang", "time": 1100.0, "uptime": 100.0},
        started(2, 1110.0, 0.0),
        {"kind": "resumed", "time": 1115.0, "uptime": 5.0},
        started(3, 1120.0, 0.0),
    ]
    spent = account(events, [record(1, 1, start=10.0, step=30.0)])
    assert spent.seconds == dict.fromkeys(ORDER, 0.0) | {
        "start": 15.0, "step": 30.0, "lost_work": 60.0, "down": 15.0,
    }  # fmt: skip


def test_a_wall_clock_that_jumps_within_an_attempt_books_nothing() -> None:
    events = [started(1, 1000.0, 0.0), {"kind": "saved", "time": 99000.0, "uptime": 3.0}]
    assert account(events, [record(1, 1, start=1.0, step=3.0)]).total == 4.0


def test_an_attempt_whose_start_a_full_disk_lost_does_not_stop_the_next() -> None:
    records = [record(1, 1, step=1.0), record(2, 2, step=1.0)]
    assert unsettled([started(1, 1000.0, 0.0), started(3, 1010.0, 0.0)], records, resumed=2) == {
        "step": 1.0,
        "down": 9.0,
    }


def test_a_run_without_events_has_no_goodput() -> None:
    assert account([], []).goodput == 0.0


def test_what_a_killed_attempt_left_open_is_settled_once_by_the_next() -> None:
    events = [
        started(1, 1000.0, 0.0),
        {"kind": "booked", "time": 1010.0, "uptime": 10.0, "seconds": {"start": 4.0, "step": 6.0}},
        started(2, 1030.0, 0.0),
    ]
    records = [record(1, 1, start=4.0, step=6.0), record(1, 2, step=5.0, data_wait=1.0)]
    assert unsettled(events, records, resumed=2) == {"step": 5.0, "data_wait": 1.0, "down": 14.0}
    left = unsettled(events, records, resumed=1)
    assert left == {"lost_work": 6.0, "down": 14.0}
    events.append({"kind": "settled", "time": 1031.0, "uptime": 1.0, "seconds": left})
    assert unsettled(events, records, resumed=1) == {}


def test_steps_that_were_booked_and_then_lost_are_taken_back() -> None:
    """As when the checkpoint at which they were booked turned out to be damaged."""
    events = [
        started(1, 1000.0, 0.0),
        {"kind": "booked", "time": 1015.0, "uptime": 15.0, "seconds": {"start": 4.0, "step": 11.0}},
        started(2, 1015.0, 0.0),
    ]
    records = [record(1, 1, start=4.0, step=6.0), record(1, 2, step=5.0)]
    assert unsettled(events, records, resumed=1) == {"step": -5.0, "lost_work": 5.0}


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=6))
def test_all_seconds_from_the_first_start_to_the_last_word_are_booked(attempts: list[tuple[int, int, int]]) -> None:
    """Each attempt: the step it resumes after, the steps it makes, seconds until the next one starts."""
    events, records, now = [], [], 1000.0
    for number, (first, steps, pause) in enumerate(attempts, 1):
        events.append(started(number, now, 0.0))
        for step in range(first, first + steps):
            records.append(record(number, step, data_wait=0.5, step=1.5))
            now += 2.0
        now += pause
    spent = account(events, records)
    assert spent.total == pytest.approx(now - attempts[-1][2] - 1000.0)
    assert spent.kept_steps + spent.lost_steps == len(records)
    assert spent.seconds["step"] == 1.5 * spent.kept_steps


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=6
    )
)
def test_the_events_alone_sum_to_the_account(attempts: list[tuple[int, int, int, int]]) -> None:
    """Each attempt: the step it resumes after, the steps it makes, after how many of them it books, a pause."""
    events, records, now = [], [], 1000.0
    for number, (first, steps, booked, pause) in enumerate(attempts, 1):
        began = now
        events.append(started(number, began, 0.0))
        left = unsettled(events, records, resumed=first)
        events.append({"kind": "settled", "time": now, "uptime": 0.0, "seconds": left})
        for step in range(1, steps + 1):
            records.append(record(number, first + step, data_wait=0.5, step=1.5))
            now += 2.0
            if step == booked:
                seconds = {"data_wait": 0.5 * step, "step": 1.5 * step}
                events.append({"kind": "booked", "time": now, "uptime": now - began, "seconds": seconds})
        now += pause
    events.append(started(len(attempts) + 1, now, 0.0))
    left = unsettled(events, records, resumed=99)
    told = [event["seconds"] for event in events if "seconds" in event] + [left]
    summed = {kind: sum(seconds.get(kind, 0.0) for seconds in told) for kind in ORDER}
    assert summed == pytest.approx(account(events, records).seconds)
    assert sum(summed.values()) == pytest.approx(now - 1000.0)
