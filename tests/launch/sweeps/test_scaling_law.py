"""The fit finds a known law again, and its bands hold as often as they say."""

from collections.abc import Sequence

import numpy as np
import pytest

from launch.sweeps.scaling_law import Measured, ScalingLaw, student_quantile
from train.errors import ConfigError

SIZES = (1e6, 2e6, 4e6, 8e6, 16e6, 32e6)
LARGE = 3e8
SIGMA = 0.01


def loss(parameters: float, tokens: float) -> float:
    """The law of Hoffmann et al. 2022, which the fit must find."""
    return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28


def at_one_ratio(parameters: float) -> float:
    return 1.7 + 400 / parameters**0.34


def measured(sizes: Sequence[float], rng: np.random.Generator | None = None) -> list[Measured]:
    noise = np.zeros(len(sizes)) if rng is None else SIGMA * rng.normal(size=len(sizes))
    return [
        Measured(int(size), int(20 * size), at_one_ratio(size) + float(one))
        for size, one in zip(sizes, noise, strict=True)
    ]


def test_losses_without_noise_give_the_law_back() -> None:
    law = ScalingLaw(measured(SIZES))
    constants = law.constants()
    assert not law.with_tokens
    assert constants["E"].value == pytest.approx(1.7, abs=1e-3)
    assert constants["a"].value == pytest.approx(0.34, abs=1e-3)
    assert constants["A"].value == pytest.approx(400, rel=0.02)
    found = law.predict(LARGE, 20 * LARGE)
    assert found.value == pytest.approx(at_one_ratio(LARGE), abs=1e-3)
    assert found.high - found.low < 0.01


def test_bands_hold_in_95_percent_of_ladders() -> None:
    """150 ladders: 95 % of them is 142.5, with a standard deviation of 2.7."""
    rng = np.random.default_rng(1)
    held: dict[str, int] = dict.fromkeys(("prediction", "E", "a", "A"), 0)
    for _ in range(150):
        law = ScalingLaw(measured(SIZES, rng))
        constants, truth = law.constants(), {"E": 1.7, "a": 0.34, "A": 400.0}
        a_later_run = at_one_ratio(LARGE) + SIGMA * float(rng.normal())
        held["prediction"] += law.predict(LARGE, 20 * LARGE).holds(a_later_run)
        for name, value in truth.items():
            held[name] += constants[name].holds(value)
    assert min(held.values()) >= 132, held
    assert max(held.values()) < 150, f"a band that always holds is too wide: {held}"


def test_several_ratios_of_tokens_to_parameters_tell_both_terms_apart() -> None:
    rng = np.random.default_rng(2)

    def runs(sigma: float) -> list[Measured]:
        points = [(n, r * n) for n in SIZES[:4] for r in (5, 20, 60)]
        return [Measured(int(n), int(d), loss(n, d) + sigma * float(rng.normal())) for n, d in points]

    held = 0
    for _ in range(20):
        a_later_run = loss(1e8, 2e9) + SIGMA * float(rng.normal())
        held += ScalingLaw(runs(SIGMA)).predict(1e8, 2e9).holds(a_later_run)
    assert held >= 17
    exact = ScalingLaw(runs(0.0))
    assert exact.with_tokens
    assert exact.constants()["b"].value == pytest.approx(0.28, abs=0.01)
    assert exact.predict(1e8, 2e9).value == pytest.approx(loss(1e8, 2e9), abs=2e-3)


def test_four_sizes_are_the_fewest_and_have_wide_bands() -> None:
    with pytest.raises(
        ConfigError, match="3 runs are too few to fit a law of 3 numbers with its error; train at least 4"
    ):
        ScalingLaw(measured(SIZES[:3]))
    rng = np.random.default_rng(3)
    four, six = ScalingLaw(measured(SIZES[:4], rng)), ScalingLaw(measured(SIZES, rng))
    width = [found.high - found.low for found in (law.predict(LARGE, 20 * LARGE) for law in (four, six))]
    assert width[0] > 3 * width[1]


def test_losses_that_rise_with_size_are_refused() -> None:
    runs = [Measured(int(size), int(20 * size), 2 + size / 1e8) for size in SIZES]
    with pytest.raises(ConfigError, match="the losses do not fall with size, so no scaling law fits"):
        ScalingLaw(runs)


@pytest.mark.parametrize(("free", "quantile"), [(1, 12.7062), (2, 4.3027), (5, 2.5706), (30, 2.0423)])
def test_students_quantiles(free: int, quantile: float) -> None:
    assert student_quantile(0.975, free) == pytest.approx(quantile, abs=1e-3)
