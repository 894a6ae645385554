"""The mixture: which source, and which of its samples, is global sample g.

Weights become counts that add up to a period. Each source is spread evenly over the period, and each lane (see
order.py) starts at a different position of it. The number of samples of a source in a lane follows from the counts, so
any g is found without a replay. A change of weights starts a new *phase* at a given sample. The samples of each lane
before that phase follow from the counts as well.

A source of L lanes (a divisor of LANES) takes the samples of global lane l into its lane l mod L, so that ranks that
own global lanes own blocks. The samples of a source of one lane are counted over all global lanes, in the order of g,
so that one epoch ends before the next begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.stream.order import LANES, Indices, SourceOrder, hash_of, locate_rows

PERIOD = 1 << 16
_TURNS_AT_ONCE = 256
_GOLDEN_STEP = 40503  # PERIOD divided by the golden ratio: lanes start far from each other


@dataclass(frozen=True)
class Phase:
    """Weights that are used from one global sample onwards."""

    first_sample: int
    weights: tuple[float, ...]
    period: int
    pattern: NDArray[np.int32]
    """The source at each position of the period. Shape (period,)."""
    earlier: NDArray[np.int64]
    """How many earlier positions of the period have the same source. Shape (period,)."""
    positions: tuple[Indices, ...]
    """The positions of each source in the period."""
    counts: NDArray[np.int64]
    """Samples of each source in a period. Shape (sources,)."""
    before_start: NDArray[np.int64]
    """Samples of each source in a period before the position where the lane starts. Shape (sources, LANES)."""
    before_phase: NDArray[np.int64]
    """Samples of each source and lane in earlier phases. Shape (sources, LANES)."""

    @property
    def starts(self) -> Indices:
        """The position in the period where each lane starts. Shape (LANES,)."""
        return _lane_starts(self.period)


@dataclass(frozen=True)
class Samples:
    """Global samples and their rows. All arrays have the shape (samples,)."""

    sample: Indices
    """Global sample index."""
    source: NDArray[np.int32]
    epoch: Indices
    row: Indices
    lane: Indices
    window: Indices
    """Number of the window in the lane."""

    def part(self, chosen: slice) -> "Samples":
        """The chosen samples."""
        return Samples(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def repeated(self, times: int) -> "Samples":
        """Each sample so many times, one after another."""
        return Samples(*(np.repeat(getattr(self, field.name), times) for field in fields(self)))


def joined(parts: Sequence[Samples]) -> Samples:
    """The samples of all parts, in order."""
    return Samples(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Samples)))


def quantise(weights: Sequence[float], period: int) -> NDArray[np.int64]:
    """Counts that add up to `period`, by largest remainder. DataError if a source of weight above 0 would get none."""
    shares = np.array(weights, np.float64) / sum(weights) * period
    counts = np.floor(shares).astype(np.int64)
    by_remainder = np.argsort(counts - shares, kind="stable")
    counts[by_remainder[: period - int(counts.sum())]] += 1
    missing = (counts == 0) & (shares > 0)
    if missing.any():
        source = int(np.flatnonzero(missing)[0])
        raise DataError(
            f"data.sources[{source}].weight ({weights[source]}) is less than 1/{period} of all weights "
            f"({sum(weights)}); raise it or leave the source out"
        )
    return counts


def first_phase(weights: Sequence[float]) -> Phase:
    """The phase that starts at sample 0."""
    return _phase(0, weights, np.zeros((len(weights), LANES), np.int64))


def next_phase(phase: Phase, first_sample: int, weights: Sequence[float]) -> Phase:
    """The phase with new weights from `first_sample` onwards. Each source continues where it was."""
    return _phase(first_sample, weights, counts_before(phase, first_sample))


def _phase(first_sample: int, weights: Sequence[float], before_phase: NDArray[np.int64]) -> Phase:
    sources = len(weights)
    period = PERIOD if sources > 1 else 1
    counts = quantise(weights, period)
    spread = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    pattern = np.repeat(np.arange(sources, dtype=np.int32), counts)[np.argsort(spread, kind="stable")]
    earlier = np.empty(period, np.int64)
    before_start = np.empty((sources, LANES), np.int64)
    positions = tuple(np.flatnonzero(pattern == source) for source in range(sources))
    for source, of_source in enumerate(positions):
        earlier[of_source] = np.arange(of_source.size)
        before_start[source] = np.searchsorted(of_source, _lane_starts(period))
    return Phase(first_sample, tuple(weights), period, pattern, earlier, positions, counts, before_start, before_phase)


def _lane_starts(period: int) -> Indices:
    return np.arange(LANES, dtype=np.int64) * _GOLDEN_STEP % period


def counts_before(phase: Phase, sample: int) -> NDArray[np.int64]:
    """The samples of each source in each lane before global sample `sample`, which is in this phase or later.

    Shape (sources, LANES)."""
    return np.stack([count_before(phase, source, sample) for source in range(len(phase.weights))])


def count_before(phase: Phase, source: int, sample: int) -> Indices:
    """The samples of one source in each lane before global sample `sample`. Shape (LANES,)."""
    lanes = np.arange(LANES, dtype=np.int64)
    turns = _first_turn(sample, lanes) - _first_turn(phase.first_sample, lanes)
    periods, position = np.divmod(turns + phase.starts, phase.period)
    upto = np.searchsorted(phase.positions[source], position)
    return phase.before_phase[source] + periods * phase.counts[source] + upto - phase.before_start[source]


def _first_turn(sample: int, lanes: Indices) -> Indices:
    """The first turn t of each lane with t * LANES + lane >= sample."""
    return -((lanes - sample) // LANES)


def locate(phases: Sequence[Phase], orders: Sequence[SourceOrder], seed: int, samples: Indices) -> Samples:
    """Source, epoch and row of each global sample. `phases` are in order, and the first starts at sample 0."""
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
        located = locate_rows(orders[number], hash_of(seed, int(number)), ordinal[chosen], lanes)
        epoch[chosen], row[chosen], lane[chosen], window[chosen] = (
            located.epoch,
            located.row,
            located.lane,
            located.window,
        )
    return Samples(samples, source, epoch, row, lane, window)


def _ordinals(phase: Phase, samples: Indices, orders: Sequence[SourceOrder]) -> tuple[NDArray[np.int32], Indices]:
    """The source of each sample, and the sample's number in its lane of that source."""
    turn, lane = np.divmod(samples, LANES)
    turn -= _first_turn(phase.first_sample, lane)
    periods, position = np.divmod(turn + lane * _GOLDEN_STEP % phase.period, phase.period)
    source = phase.pattern[position]
    within = phase.earlier[position] - phase.before_start[source, lane]
    in_lane = phase.before_phase[source, lane] + periods * phase.counts[source] + within
    source_lanes = np.array([order.lanes for order in orders])[source]
    ordinal = in_lane * (LANES // source_lanes) + lane // source_lanes
    for number in np.unique(source[source_lanes == 1]).tolist():
        chosen = source == number
        ordinal[chosen] = _ordinals_over_all_lanes(phase, number, samples[chosen])
    return source, ordinal


def _ordinals_over_all_lanes(phase: Phase, source: int, samples: Indices) -> Indices:
    """The number of earlier samples of the same source, for samples of one source in the order of g."""
    if len(phase.weights) == 1:
        return samples
    turn, lane = np.divmod(samples, LANES)
    turns, which = np.unique(turn, return_inverse=True)
    out = np.empty(len(samples), np.int64)
    lanes = np.arange(LANES, dtype=np.int64)
    is_source = phase.pattern == source
    upto = np.cumsum(is_source) - is_source
    earlier_phases, before_start = phase.before_phase[source], phase.before_start[source]
    for start in range(0, len(turns), _TURNS_AT_ONCE):
        done = turns[start : start + _TURNS_AT_ONCE, None] - _first_turn(phase.first_sample, lanes)
        periods, position = np.divmod(np.maximum(done, 0) + phase.starts, phase.period)
        before = earlier_phases + periods * phase.counts[source] + upto[position] - before_start
        in_turn = is_source[position] & (done >= 0)
        earlier = before.sum(axis=1)[:, None] + np.cumsum(in_turn, axis=1) - in_turn
        chosen = (which >= start) & (which < start + _TURNS_AT_ONCE)
        out[chosen] = earlier[which[chosen] - start, lane[chosen]]
    return out
