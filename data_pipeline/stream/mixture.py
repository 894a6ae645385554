"""Which source, and which of its samples, is global sample g: weights spread evenly, and changed at known samples.

Weights become counts that add up to a period; each source's places are spread evenly over the period, and each lane
(see order.py) starts at another place of it. How many samples of a source a lane has had follows from the counts, so
any g is found without a replay. A change of weights starts a new *phase* at a given sample; the counts of each lane up
to there are closed forms as well.

A source of L lanes (a divisor of LANES) takes the samples of global lane l into its lane l mod L, so that ranks which
own global lanes own blocks. A source of one lane has no such locality to keep: its samples are counted over all lanes,
in the order of g, so that its epochs follow each other sharply.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.stream.order import LANES, Indices, Placed, SourceOrder, hash_of, place

PERIOD = 1 << 16
_TURNS_AT_ONCE = 256
_GOLDEN_STEP = 40503  # the golden ratio of PERIOD: lanes start far from each other


@dataclass(frozen=True)
class Phase:
    """Weights that hold from a global sample on."""

    first_sample: int
    weights: tuple[float, ...]
    period: int
    pattern: NDArray[np.int32]  # [period] source
    rank: NDArray[np.int64]  # [period] how many of that source stand before
    places: tuple[Indices, ...]  # of each source in the period
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


def joined(parts: Sequence[Samples]) -> Samples:
    return Samples(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Samples)))


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
    places_of = tuple(np.flatnonzero(pattern == source) for source in range(sources))
    for source, mine in enumerate(places_of):
        rank[mine] = np.arange(mine.size)
        below[source] = np.searchsorted(mine, starts)
    return Phase(first_sample, tuple(weights), period, pattern, rank, places_of, counts, below, before)


def counts_before(phase: Phase, sample: int) -> NDArray[np.int64]:
    """[sources, LANES] samples of each source in each lane before global sample `sample` (in this phase or later)."""
    return np.stack([count_before(phase, source, sample) for source in range(len(phase.weights))])


def count_before(phase: Phase, source: int, sample: int) -> Indices:
    """[LANES] the same for one source."""
    lanes = np.arange(LANES, dtype=np.int64)
    turns = _first_turn(sample, lanes) - _first_turn(phase.first_sample, lanes)
    periods, place_in_period = np.divmod(turns + phase.starts, phase.period)
    upto = np.searchsorted(phase.places[source], place_in_period)
    return phase.before[source] + periods * phase.counts[source] + upto - phase.below[source]


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
        source[chosen], ordinal[chosen] = _ordinals(phases[number], samples[chosen], orders)
    epoch, row, lane, window = (np.empty(len(samples), np.int64) for _ in range(4))
    for number in np.unique(source):
        chosen = source == number
        lanes = samples[chosen] % orders[number].lanes
        placed: Placed = place(orders[number], hash_of(seed, int(number)), ordinal[chosen], lanes)
        epoch[chosen], row[chosen], lane[chosen], window[chosen] = placed.epoch, placed.row, placed.lane, placed.window
    return Samples(samples, source, epoch, row, lane, window)


def _ordinals(phase: Phase, samples: Indices, orders: Sequence[SourceOrder]) -> tuple[NDArray[np.int32], Indices]:
    """The source of each sample, and its number in its lane of that source."""
    turn, lane = np.divmod(samples, LANES)
    turn -= _first_turn(phase.first_sample, lane)
    periods, place_in_period = np.divmod(turn + lane * _GOLDEN_STEP % phase.period, phase.period)
    source = phase.pattern[place_in_period]
    within = phase.rank[place_in_period] - phase.below[source, lane]
    in_lane = phase.before[source, lane] + periods * phase.counts[source] + within
    source_lanes = np.array([order.lanes for order in orders])[source]
    ordinal = in_lane * (LANES // source_lanes) + lane // source_lanes
    for number in np.unique(source[source_lanes == 1]).tolist():
        chosen = source == number
        ordinal[chosen] = _ordinals_over_all_lanes(phase, number, samples[chosen])
    return source, ordinal


def _ordinals_over_all_lanes(phase: Phase, source: int, samples: Indices) -> Indices:
    """How many samples of the source come before each of these samples of the source, in the order of g."""
    if len(phase.weights) == 1:
        return samples
    turn, lane = np.divmod(samples, LANES)
    turns, which = np.unique(turn, return_inverse=True)
    out = np.empty(len(samples), np.int64)
    lanes = np.arange(LANES, dtype=np.int64)
    is_source = phase.pattern == source
    upto = np.cumsum(is_source) - is_source
    for start in range(0, len(turns), _TURNS_AT_ONCE):
        done = turns[start : start + _TURNS_AT_ONCE, None] - _first_turn(phase.first_sample, lanes)
        periods, place_in_period = np.divmod(np.maximum(done, 0) + phase.starts, phase.period)
        before = phase.before[source] + periods * phase.counts[source] + upto[place_in_period] - phase.below[source]
        here = is_source[place_in_period] & (done >= 0)
        earlier = before.sum(axis=1)[:, None] + np.cumsum(here, axis=1) - here
        chosen = (which >= start) & (which < start + _TURNS_AT_ONCE)
        out[chosen] = earlier[which[chosen] - start, lane[chosen]]
    return out
