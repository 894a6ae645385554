"""Which source, and which of its samples, is global sample g: weights spread evenly, and changed at known samples.

Weights become counts that add up to a period; each source's places are spread evenly over the period, and each lane
(see order.py) starts at another place of it. How many samples of a source a lane has had follows from the counts, so
any g is found without a replay. A change of weights starts a new *phase* at a given sample; the counts of each lane up
to there are closed forms as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.order import LANES, Indices, Placed, SourceOrder, hash_of, place

PERIOD = 1 << 16
_GOLDEN_STEP = 40503  # the golden ratio of PERIOD: lanes start far from each other


@dataclass(frozen=True)
class Phase:
    """Weights that hold from a global sample on."""

    first_sample: int
    weights: tuple[float, ...]
    period: int
    pattern: NDArray[np.int32]  # [period] source
    rank: NDArray[np.int64]  # [period] how many of that source stand before
    counts: NDArray[np.int64]  # [sources] in a period
    below: NDArray[np.int64]  # [sources, LANES] of a period, before the place where the lane starts
    before: NDArray[np.int64]  # [sources, LANES] samples in earlier phases

    @property
    def starts(self) -> Indices:
        """[LANES] place in the period where each lane starts."""
        return np.arange(LANES, dtype=np.int64) * _GOLDEN_STEP % self.period


@dataclass(frozen=True)
class Samples:
    """Global samples and where they are."""

    sample: Indices
    source: NDArray[np.int32]
    epoch: Indices
    row: Indices
    lane: Indices
    window: Indices

    def part(self, chosen: slice) -> "Samples":
        return Samples(*(getattr(self, field.name)[chosen] for field in fields(self)))


def quantise(weights: Sequence[float], period: int) -> NDArray[np.int64]:
    """Counts that add up to `period`, by largest remainder. DataError if a source would get none."""
    shares = np.array(weights, np.float64) / sum(weights) * period
    counts = np.floor(shares).astype(np.int64)
    by_remainder = np.argsort(counts - shares, kind="stable")
    counts[by_remainder[: period - int(counts.sum())]] += 1
    if (counts == 0).any():
        source = int(np.flatnonzero(counts == 0)[0])
        raise DataError(
            f"data.sources[{source}].weight ({weights[source]}) is less than 1/{period} of all weights "
            f"({sum(weights)}); raise it or leave the source out"
        )
    return counts


def first_phase(weights: Sequence[float]) -> Phase:
    return _phase(0, weights, np.zeros((len(weights), LANES), np.int64))


def next_phase(phase: Phase, first_sample: int, weights: Sequence[float]) -> Phase:
    """Other weights from `first_sample` on; each source goes on where it was."""
    return _phase(first_sample, weights, counts_before(phase, first_sample))


def _phase(first_sample: int, weights: Sequence[float], before: NDArray[np.int64]) -> Phase:
    sources = len(weights)
    period = PERIOD if sources > 1 else 1
    counts = quantise(weights, period)
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    pattern = np.repeat(np.arange(sources, dtype=np.int32), counts)[np.argsort(places, kind="stable")]
    rank = np.empty(period, np.int64)
    starts = np.arange(LANES, dtype=np.int64) * _GOLDEN_STEP % period
    below = np.empty((sources, LANES), np.int64)
    for source in range(sources):
        mine = np.flatnonzero(pattern == source)
        rank[mine] = np.arange(mine.size)
        below[source] = np.searchsorted(mine, starts)
    return Phase(first_sample, tuple(weights), period, pattern, rank, counts, below, before)


def counts_before(phase: Phase, sample: int) -> NDArray[np.int64]:
    """[sources, LANES] samples of each source in each lane before global sample `sample` (in this phase or later)."""
    lanes = np.arange(LANES, dtype=np.int64)
    turns = _first_turn(sample, lanes) - _first_turn(phase.first_sample, lanes)
    periods, place_in_period = np.divmod(turns + phase.starts, phase.period)
    out = np.empty_like(phase.before)
    for source in range(len(phase.weights)):
        upto = np.searchsorted(np.flatnonzero(phase.pattern == source), place_in_period)
        out[source] = phase.before[source] + periods * phase.counts[source] + upto - phase.below[source]
    return out


def _first_turn(sample: int, lanes: Indices) -> Indices:
    """The first turn t of each lane with t * LANES + lane >= sample."""
    return -((lanes - sample) // LANES)


def locate(phases: Sequence[Phase], orders: Sequence[SourceOrder], seed: int, samples: Indices) -> Samples:
    """Source, epoch and row of each global sample. `phases` are in order and the first starts at sample 0."""
    firsts = np.array([phase.first_sample for phase in phases], np.int64)
    which = np.searchsorted(firsts, samples, side="right") - 1
    source = np.empty(len(samples), np.int32)
    ordinal = np.empty(len(samples), np.int64)
    for number in np.unique(which):
        chosen = which == number
        source[chosen], ordinal[chosen] = _ordinals(phases[number], samples[chosen])
    epoch, row, lane, window = (np.empty(len(samples), np.int64) for _ in range(4))
    for number in np.unique(source):
        chosen = source == number
        placed: Placed = place(orders[number], hash_of(seed, int(number)), ordinal[chosen], samples[chosen] % LANES)
        epoch[chosen], row[chosen], lane[chosen], window[chosen] = placed.epoch, placed.row, placed.lane, placed.window
    return Samples(samples, source, epoch, row, lane, window)


def _ordinals(phase: Phase, samples: Indices) -> tuple[NDArray[np.int32], Indices]:
    """The source of each sample, and its number among that source's samples in the same lane."""
    turn, lane = np.divmod(samples, LANES)
    turn -= _first_turn(phase.first_sample, lane)
    periods, place_in_period = np.divmod(turn + lane * _GOLDEN_STEP % phase.period, phase.period)
    source = phase.pattern[place_in_period]
    within = phase.rank[place_in_period] - phase.below[source, lane]
    return source, phase.before[source, lane] + periods * phase.counts[source] + within
