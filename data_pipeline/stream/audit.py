"""The audit: checks that a plan gives each row exactly as often as it should, and that a run used what was planned.

It walks the plan from the first sample, as each number of ranks would. A complete epoch must have each row exactly
once, any other epoch at most once. The counters of the run must equal those of the walk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_pipeline.batch_sizes import BatchSizes, Changes
from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.progress import Progress, silent
from data_pipeline.shards.dataset import DataSet
from data_pipeline.stream.counters import Counts, add, count, from_json
from data_pipeline.stream.mixture import Samples
from data_pipeline.stream.plan import Plan, plan_sources, rank_samples, with_weights
from data_pipeline.stream.saved_state import check_unchanged, describe, merge_states

CHUNK_SAMPLES = 1 << 16


@dataclass(frozen=True)
class EpochAudit:
    """The rows of one epoch of one source that the samples used, each once."""

    source: int
    epoch: int
    rows: int
    """Rows of the source."""
    seen: int
    """Rows used."""

    @property
    def complete(self) -> bool:
        """Whether every row was used."""
        return self.seen == self.rows


@dataclass(frozen=True)
class Audit:
    """The result of an audit without errors."""

    samples: int
    world_sizes: tuple[int, ...]
    epochs: tuple[EpochAudit, ...]
    counters_compared: bool
    """Whether the counters of a checkpoint were compared with the plan."""


def plan_of(
    config: DataConfig,
    seq_len: int,
    global_batch_size: int,
    states: Sequence[dict[str, Any]],
    batch_changes: Changes = (),
) -> Plan:
    """The plan of a run, with the weights that it had until `states` were saved. Without states: of a new run.

    `batch_changes`: the planned changes of the batch size. DataError if the data changed since."""
    datasets = [DataSet(source.path, source.mirror) for source in config.sources]
    plan = plan_sources(config, datasets, seq_len)
    if not states:
        return with_weights(plan, config, BatchSizes.of(global_batch_size, changes=batch_changes))
    saved = states[0]
    check_unchanged(saved, config.seed, seq_len, [describe(dataset) for dataset in datasets])
    sizes = BatchSizes.of(global_batch_size, saved, batch_changes)
    return with_weights(plan, config, sizes, saved["samples"], saved["weights"])


def audit(
    plan: Plan,
    samples: int,
    world_sizes: Sequence[int],
    states: Sequence[dict[str, Any]] = (),
    progress: Progress = silent,
) -> Audit:
    """Walks the first `samples` samples. DataError names the first violation."""
    seen: dict[tuple[int, int], np.ndarray] = {}
    counts: Counts = {}
    with progress("auditing", samples, "samples") as advance:
        for first in range(0, samples, CHUNK_SAMPLES):
            located = plan.locate(np.arange(first, min(first + CHUNK_SAMPLES, samples), dtype=np.int64))
            for world_size in world_sizes:
                _check_ranks(plan, located, world_size)
            _mark(plan, located, seen)
            counts = add(counts, count(located))
            advance(len(located.sample))
    compared = bool(states) and merge_states(states)["samples"] == samples
    if compared:
        _compare(counts, from_json(merge_states(states)["counters"]))
    epochs = (EpochAudit(source, epoch, len(rows), int(rows.sum())) for (source, epoch), rows in sorted(seen.items()))
    return Audit(samples, tuple(world_sizes), tuple(epochs), compared)


def _check_ranks(plan: Plan, located: Samples, world_size: int) -> None:
    """DataError unless the ranks, each for itself, locate the same samples as one rank alone."""
    first = int(located.sample[0])
    start = -(-first // world_size) * world_size
    number = (int(located.sample[-1]) + 1 - start) // world_size
    for rank in range(world_size):
        by_rank = plan.locate(rank_samples(start, number, rank, world_size))
        chosen = slice(start - first + rank, start - first + number * world_size, world_size)
        for name in ("sample", "source", "epoch", "row"):
            if not np.array_equal(getattr(by_rank, name), getattr(located, name)[chosen]):
                raise DataError(
                    f"rank {rank} of {world_size} has another {name} than one rank alone, near sample {first}; "
                    f"please report this bug"
                )


def _mark(plan: Plan, located: Samples, seen: dict[tuple[int, int], np.ndarray]) -> None:
    """Marks the rows as seen. DataError if one was seen before in its epoch."""
    for source in np.unique(located.source).tolist():
        of_source = located.source == source
        for epoch in np.unique(located.epoch[of_source]).tolist():
            rows = located.row[of_source & (located.epoch == epoch)]
            marks = seen.setdefault((source, epoch), np.zeros(plan.orders[source].rows, bool))
            if marks[rows].any() or len(np.unique(rows)) != len(rows):
                raise DataError(
                    f"source {source} gives a row twice in epoch {epoch}, near sample {located.sample[0]}; "
                    f"please report this bug"
                )
            marks[rows] = True


def _compare(planned: Counts, used: Counts) -> None:
    for key in sorted(planned.keys() | used.keys()):
        if planned.get(key) != used.get(key):
            raise DataError(
                f"the run's counters differ from its plan: source {key[0]}, epoch {key[1]}: planned (rows, sum of "
                f"hashes) {planned.get(key)}, used {used.get(key)}"
            )
