import pytest

from train.records.clock import KINDS, Clock, Lap


class Ticks:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_every_second_counts_toward_the_phase_it_was_spent_in() -> None:
    ticks = Ticks()
    clock = Clock(already=2.0, now=ticks)
    for phase, seconds in (("data", 3), ("forward", 5), ("update", 7), ("save", 11), ("data", 13)):
        clock.enter(phase)
        ticks.seconds += seconds
    assert clock.totals() == {"start": 2.0, "data_wait": 16.0, "step": 12.0, "checkpoint_stall": 11.0}


def test_a_lap_starts_again_after_each_take_and_the_phase_continues() -> None:
    ticks = Ticks()
    clock = Clock(now=ticks)
    lap = Lap(clock)
    clock.enter("forward")
    ticks.seconds += 1
    assert lap.take() == {"step": 1.0}
    ticks.seconds += 2
    assert lap.take() == {"step": 2.0}


def test_two_laps_of_one_clock_each_see_every_second_once() -> None:
    ticks = Ticks()
    clock = Clock(now=ticks)
    often, rarely = Lap(clock), Lap(clock)
    sums = [0.0, 0.0]
    for number in range(50):
        clock.enter(list(KINDS)[number % len(KINDS)])
        ticks.seconds += 0.125 * number
        for index, (lap, every) in enumerate(((often, 2), (rarely, 7))):
            if number % every == 0:
                sums[index] += sum(lap.take().values())
    sums = [seconds + sum(lap.take().values()) for seconds, lap in zip(sums, (often, rarely), strict=True)]
    assert sums == pytest.approx([ticks.seconds - 100.0] * 2)
