"""Fits the scaling law L(N, D) = E + A / N^a (+ B / D^b) to measured losses, and predicts others with a band.

L is the loss in nats per token, N the number of parameters, D the number of training tokens (Hoffmann et al. 2022,
equation 2). Where all runs have the same D / N, the two terms cannot be told apart. Then the fit has the first one, and
holds at that D / N alone.

For given exponents the law is linear in E, A and B. So all exponents of a grid are tried, and the rest follows by least
squares. A band holds every value with which some law fits the runs nearly as well as the best one: the sum of squares
is below min (1 + t^2 / f). There f is the number of runs minus the number of coefficients, and t the quantile of
Student's distribution. For a linear law this is the usual interval. Here it also has the uncertainty of the exponents.
The errors of all losses are taken as equally large and independent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from train.errors import ConfigError

Array = NDArray[np.float64]

LOWEST, HIGHEST = 0.02, 2.0
"""Range of the exponents."""
STEPS = {1: 200, 2: 60}
"""Values of each exponent in a grid, by the number of exponents."""
SAME_RATIO = 1.05
"""Largest quotient of two D / N that count as one."""


@dataclass(frozen=True)
class Measured:
    """The loss of one run."""

    parameters: int
    tokens: int
    loss: float
    """Nats per token."""


@dataclass(frozen=True)
class Estimate:
    """A value with its band."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a value lies in the band."""
        return self.low <= value <= self.high


class ScalingLaw:
    """The law that fits the runs best, and all those that fit nearly as well."""

    def __init__(self, runs: Sequence[Measured], level: float = 0.95) -> None:
        """Fit the runs. `level`: the share of cases in which a band holds the true value.

        ConfigError if there are too few runs, or if losses do not fall with size."""
        ratios = [run.tokens / run.parameters for run in runs]
        self.with_tokens = max(ratios, default=0.0) > SAME_RATIO * min(ratios, default=0.0)
        """Whether the fit has the term B / D^b."""
        coefficients, exponents = (3, 2) if self.with_tokens else (2, 1)
        self.free = len(runs) - coefficients - exponents
        """Degrees of freedom: runs beyond those that fix the law."""
        if self.free < 1:
            raise ConfigError(
                f"{len(runs)} runs are too few to fit a law of {coefficients + exponents} numbers with its error; "
                f"train at least {coefficients + exponents + 1} (--sizes, --tokens-per-parameter)"
            )
        sizes = np.array([(run.parameters, run.tokens) for run in runs], dtype=np.float64)
        self._units: Array = np.exp(np.log(sizes[:, :exponents]).mean(axis=0))
        self._runs, self._level = runs, level
        self._fit([(LOWEST, HIGHEST)] * exponents)
        fits = self._exponents[self._squares <= self._limit]
        step = (HIGHEST / LOWEST) ** (1 / (STEPS[exponents] - 1))
        lows, highs = np.maximum(fits.min(axis=0) / step, LOWEST), np.minimum(fits.max(axis=0) * step, HIGHEST)
        self._fit(list(zip(lows.tolist(), highs.tolist(), strict=True)))

    def _fit(self, ranges: Sequence[tuple[float, float]]) -> None:
        """Least squares for all exponents of a grid over these ranges, and the sum of squares up to which a law fits.

        ConfigError if no law fits."""
        axes = [np.geomspace(low, high, STEPS[len(ranges)]) for low, high in ranges]
        self._exponents: Array = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
        design = self._columns([(run.parameters, run.tokens) for run in self._runs])
        losses = np.array([run.loss for run in self._runs])
        self._betas, self._inverses, self._squares = least_squares(design, losses)
        negative = self._betas[:, 0] < 0  # a loss is never below 0, so E is 0 there
        if negative.any():
            betas, inverses, squares = least_squares(design[negative][:, :, 1:], losses)
            self._betas[negative] = np.pad(betas, ((0, 0), (1, 0)))
            self._inverses[negative] = np.pad(inverses, ((0, 0), (1, 0), (1, 0)))
            self._squares[negative] = squares
        self._squares[(self._betas[:, 1:] < 0).any(axis=1)] = np.inf
        self._best = int(np.argmin(self._squares))
        if not math.isfinite(self._squares[self._best]):
            raise ConfigError("the losses do not fall with size, so no scaling law fits; see the table of runs")
        # Rounding leaves a trace in the losses even where a law fits them exactly.
        least = max(float(self._squares[self._best]), len(losses) * (1e-6 * float(losses.max())) ** 2)
        self.sigma = math.sqrt(least / self.free)
        """Standard deviation of the losses around the law, in nats per token."""
        self._limit = least + (self.sigma * student_quantile(0.5 + self._level / 2, self.free)) ** 2

    def _columns(self, sizes: Sequence[tuple[float, float]]) -> Array:
        """1, N^-a and D^-b of each size for all exponents: shape (exponents, sizes, coefficients).

        The unit of N and D is their geometric mean, so that columns are of about equal size."""
        numbers = np.array(sizes, dtype=np.float64)[:, : self._exponents.shape[1]]
        powers = (numbers / self._units)[None] ** -self._exponents[:, None, :]
        return np.concatenate((np.ones_like(powers[:, :, :1]), powers), axis=2)

    def _interval(self, contrast: Array, more_variance: float = 0.0) -> Estimate:
        """The band of contrast x coefficients, whose shape is (exponents, coefficients), over all laws that fit.

        `more_variance`: in variances of one loss, what a new measurement adds."""
        values = (contrast * self._betas).sum(axis=1)
        variances = np.einsum("ei,eij,ej->e", contrast, self._inverses, contrast) + more_variance
        fits = self._squares <= self._limit
        half = np.sqrt((self._limit - self._squares[fits]) * variances[fits])
        low, high = (values[fits] - half).min(), (values[fits] + half).max()
        return Estimate(float(values[self._best]), max(0.0, float(low)), float(high))

    def predict(self, parameters: float, tokens: float) -> Estimate:
        """The loss of a run of this size, in nats per token. The band is that of one run, which has its own error."""
        return self._interval(self._columns([(parameters, tokens)])[:, 0], more_variance=1.0)

    def constants(self) -> dict[str, Estimate]:
        """E, a, A, and with tokens b and B. Each band holds the values with which some law fits."""
        units = self._units[None] ** self._exponents  # back to N and D in ones
        found = {"E": self._interval(self._contrast(0, np.ones(len(units))))}
        fits = self._squares <= self._limit
        for index, (power, factor) in enumerate([("a", "A"), ("b", "B")][: units.shape[1]]):
            values = self._exponents[:, index]
            held = values[fits]
            found[power] = Estimate(float(values[self._best]), float(held.min()), float(held.max()))
            found[factor] = self._interval(self._contrast(index + 1, units[:, index]))
        return found

    def _contrast(self, index: int, factors: Array) -> Array:
        contrast = np.zeros_like(self._betas)
        contrast[:, index] = factors
        return contrast


def least_squares(design: Array, losses: Array) -> tuple[Array, Array, Array]:
    """Coefficients, inverse normal matrices and sums of squares of designs (exponents, runs, coefficients)."""
    transposed = design.swapaxes(1, 2)
    inverses = np.linalg.pinv(transposed @ design, hermitian=True).astype(np.float64)
    betas = (inverses @ (transposed @ losses)[:, :, None])[:, :, 0]
    residuals = losses - (design @ betas[:, :, None])[:, :, 0]
    return betas, inverses, (residuals**2).sum(axis=1)


def student_quantile(share: float, free: int) -> float:
    """The quantile of Student's t distribution with `free` degrees of freedom.

    With t = sqrt(free) tan(angle) its density is cos(angle)^(free - 1), up to a factor."""
    angles = np.linspace(-math.pi / 2, math.pi / 2, 200_001)
    density = np.cos(angles).clip(0) ** (free - 1)
    cumulative = np.cumsum((density[1:] + density[:-1]) / 2)
    at = np.interp(share, cumulative / cumulative[-1], angles[1:])
    return math.sqrt(free) * math.tan(at)
