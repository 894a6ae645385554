import pytest

from train.records.clock import KINDS, Clock


class Ticks:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_every_second_is_booked_to_the_phase_it_was_spent_in() -> None:
    ticks = Ticks()
    clock = Clock(already=2.0, now=ticks)
    for phase, seconds in (("data", 3), ("forward", 5), ("update", 7), ("save", 11), ("data", 13)):
        ticks.seconds += {"data": 0}.get(phase, 0)
        clock.enter(phase)
        ticks.seconds += seconds
    assert clock.take() == {"start": 2.0, "data_wait": 16.0, "step": 12.0, "checkpoint_stall": 11.0}


def test_take_starts_anew_and_keeps_the_present_phase() -> None:
    ticks = Ticks()
    clock = Clock(now=ticks)
    clock.enter("forward")
    ticks.seconds += 1
    clock.take()
    ticks.seconds += 2
    assert clock.take() == {"step": 2.0}


def test_the_parts_sum_to_the_whole() -> None:
    ticks = Ticks()
    clock = Clock(now=ticks)
    taken = 0.0
    for number in range(50):
        clock.enter(list(KINDS)[number % len(KINDS)])
        ticks.seconds += 0.125 * number
        if number % 7 == 0:
            taken += sum(clock.take().values())
    taken += sum(clock.take().values())
    assert taken == pytest.approx(ticks.seconds - 100.0)
