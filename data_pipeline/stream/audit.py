"""Proof that a plan gives each row as often as it says, and that a run used what its plan says.

The plan is walked from the first sample on, as each number of ranks would walk it. In every epoch that is complete each
row must have come exactly once, in the others at most once; and the run's counters must be those of the walk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.stream.counters import Counts, add, count, from_json
from data_pipeline.stream.mixture import Samples
from data_pipeline.stream.plan import Plan, check_unchanged, describe, plan_sources, rank_samples, with_weights
from data_pipeline.stream.stream import merge_states

CHUNK_SAMPLES = 1 << 16


@dataclass(frozen=True)
class EpochAudit:
    source: int
    epoch: int
    rows: int
    """Of the source."""
    seen: int
    """Rows that came, each once."""

    @property
    def complete(self) -> bool:
        return self.seen == self.rows


@dataclass(frozen=True)
class Audit:
    samples: int
    world_sizes: tuple[int, ...]
    epochs: tuple[EpochAudit, ...]
    counters_compared: bool


def plan_of(config: DataConfig, seq_len: int, global_batch_size: int, states: Sequence[dict[str, Any]]) -> Plan:
    """The plan of a run, with the weights that it really had if it saved its state."""
    datasets = [DataSet(source.path, source.mirror) for source in config.sources]
    plan = plan_sources(config, datasets, seq_len)
    if not states:
        return with_weights(plan, config, global_batch_size)
    saved = states[0]
    check_unchanged(saved, config.seed, seq_len, [describe(dataset) for dataset in datasets])
    return with_weights(plan, config, global_batch_size, saved["samples"], saved["weights"])


def audit(plan: Plan, samples: int, world_sizes: Sequence[int], states: Sequence[dict[str, Any]] = ()) -> Audit:
    """Walk `samples` samples. DataError names what is not as it should be."""
    seen: dict[tuple[int, int], np.ndarray] = {}
    counts: Counts = {}
    for first in range(0, samples, CHUNK_SAMPLES):
        located = plan.locate(np.arange(first, min(first + CHUNK_SAMPLES, samples), dtype=np.int64))
        for size in world_sizes:
            _check_ranks(plan, located, size)
        _mark(plan, located, seen)
        counts = add(counts, count(located))
    compared = bool(states) and merge_states(states)["samples"] == samples
    if compared:
        _compare(counts, from_json(merge_states(states)["counters"]))
    epochs = (EpochAudit(source, epoch, len(rows), int(rows.sum())) for (source, epoch), rows in sorted(seen.items()))
    return Audit(samples, tuple(world_sizes), tuple(epochs), compared)


def _check_ranks(plan: Plan, whole: Samples, world_size: int) -> None:
    """What all ranks locate for themselves must make up the whole."""
    first = int(whole.sample[0])
    start = -(-first // world_size) * world_size
    number = (int(whole.sample[-1]) + 1 - start) // world_size
    for rank in range(world_size):
        mine = plan.locate(rank_samples(start, number, rank, world_size))
        chosen = slice(start - first + rank, start - first + number * world_size, world_size)
        for name in ("sample", "source", "epoch", "row"):
            if not np.array_equal(getattr(mine, name), getattr(whole, name)[chosen]):
                raise DataError(f"rank {rank} of {world_size} has another {name} than one rank alone near {first}")


def _mark(plan: Plan, located: Samples, seen: dict[tuple[int, int], np.ndarray]) -> None:
    for source in np.unique(located.source).tolist():
        of_source = located.source == source
        for epoch in np.unique(located.epoch[of_source]).tolist():
            rows = located.row[of_source & (located.epoch == epoch)]
            marks = seen.setdefault((source, epoch), np.zeros(plan.orders[source].rows, bool))
            if marks[rows].any() or len(np.unique(rows)) != len(rows):
                raise DataError(f"source {source} gives a row twice in epoch {epoch} near sample {located.sample[0]}")
            marks[rows] = True


def _compare(planned: Counts, used: Counts) -> None:
    for key in sorted(planned.keys() | used.keys()):
        if planned.get(key) != used.get(key):
            raise DataError(
                f"the run's counters differ from its plan: source {key[0]}, epoch {key[1]}: planned (rows, sum of "
                f"hashes) {planned.get(key)}, used {used.get(key)}"
            )
