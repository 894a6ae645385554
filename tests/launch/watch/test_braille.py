import math

from launch.watch.braille import curve, limits


def test_the_highest_value_is_at_the_top_and_a_spike_of_one_step_is_seen() -> None:
    lines = curve(range(100), [1.0] * 50 + [9.0] + [1.0] * 49, width=10, height=3)
    assert [len(line) for line in lines] == [10, 10, 10]
    assert [sum(dot != "\u2800" for dot in line) for line in lines] == [1, 1, 10]
    assert "\u28b8" in lines[1] or "\u2847" in lines[1], "the whole column is filled"


def test_values_that_are_not_finite_and_constant_ones_are_drawn_without_an_error() -> None:
    assert curve([1, 2, 3], [math.nan, math.inf, 2.0], 4, 1) != curve([], [], 4, 1) == ["\u2800" * 4]
    assert limits([math.nan]) == (-0.5, 0.5)
    assert limits([4.0, 4.0]) == (2.0, 6.0)
