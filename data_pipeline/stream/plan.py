"""The plan of a run: the source, epoch and row of each global sample, under all weights that the run has had.

The plan is the same on every rank and does not depend on the number of ranks. `rank_samples` gives one rank's samples.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_pipeline.batch_sizes import BatchSizes
from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import TRAIN
from data_pipeline.stream.mixture import Phase, Samples, count_before, first_phase, locate, next_phase
from data_pipeline.stream.order import LANES, Indices, SourceOrder, source_order

log = logging.getLogger(__name__)

_ONE_EACH = BatchSizes(((0, 1),))

WeightLog = list[list[Any]]
"""[first sample, weights] of each phase, in order, as JSON values."""


@dataclass(frozen=True)
class Plan:
    """Which rows a run reads, in which order."""

    seed: int
    orders: tuple[SourceOrder, ...]
    cuts: tuple[int, ...]
    """Number of rows of seq_len tokens that a stored row is cut into, by source."""
    batch_sizes: BatchSizes = _ONE_EACH
    phases: tuple[Phase, ...] = field(default=(), repr=False)

    def locate(self, samples: Indices) -> Samples:
        """The source, epoch and row of each global sample."""
        return locate(self.phases, self.orders, self.seed, samples)

    def weight_log(self, before_sample: int) -> WeightLog:
        """The weights of all phases that began before this sample."""
        phases = [phase for phase in self.phases if phase.first_sample < max(before_sample, 1)]
        return [[phase.first_sample, list(phase.weights)] for phase in phases]

    def first_windows(self, source: int, next_sample: int, rank: int, world_size: int) -> Indices:
        """The first window in each lane of the source that this rank may still use from `next_sample` on.

        Shape (lanes of the source,)."""
        order = self.orders[source]
        phase = next(phase for phase in reversed(self.phases) if phase.first_sample <= next_sample)
        lanes = np.arange(LANES, dtype=np.int64)
        counts = count_before(phase, source, next_sample)
        if order.lanes == 1:
            return counts.sum(keepdims=True) // order.window_slots
        ordinals = counts * (LANES // order.lanes) + lanes // order.lanes
        if LANES % world_size == 0:  # this rank never uses the lanes of other ranks
            ordinals[(lanes - next_sample) % world_size != rank] = np.iinfo(np.int64).max
        return ordinals.reshape(-1, order.lanes).min(axis=0) // order.window_slots


def rank_samples(first_sample: int, number: int, rank: int, world_size: int) -> Indices:
    """The first `number` global samples of a rank from `first_sample` on, where a step begins."""
    return first_sample + rank + np.arange(number, dtype=np.int64) * world_size


def plan_sources(config: DataConfig, datasets: Sequence[DataSet], seq_len: int) -> Plan:
    """A plan without weights. DataError if the data sets do not fit each other or `seq_len`."""
    _check_alike(datasets, seq_len)
    manifests = [dataset.manifest for dataset in datasets]
    cuts = tuple(manifest.row_tokens // seq_len for manifest in manifests)
    orders = tuple(
        source_order(manifest.splits[TRAIN].rows * cut, manifest.block_rows * cut)
        for manifest, cut in zip(manifests, cuts, strict=True)
    )
    return Plan(config.seed, orders, cuts)


def with_weights(
    plan: Plan, config: DataConfig, batch_sizes: BatchSizes, first_sample: int = 0, past: WeightLog | None = None
) -> Plan:
    """The plan of a run that starts at `first_sample`, with the weights `past` until there and the recipe's from there.

    DataError if a weight is too small."""
    changes = [(0, tuple(source.weight for source in config.sources))]
    changes += [(batch_sizes.first_sample(change.step), change.weights) for change in config.weight_changes]
    if past is not None:
        current = [weights for sample, weights in changes if sample <= first_sample][-1]
        later = [change for change in changes if change[0] > first_sample]
        added = (0.0,) * (len(config.sources) - len(past[0][1]))  # sources that the run did not have then
        changes = [(sample, (*weights, *added)) for sample, weights in past]
        if changes[-1][1] != current:
            log.info("from sample %d on, the weights of the sources are %s", first_sample, list(current))
            changes.append((first_sample, current))
        changes += later
    phases = [first_phase(changes[0][1])]
    for sample, weights in changes[1:]:
        phases.append(next_phase(phases[-1], sample, weights))
    return Plan(plan.seed, plan.orders, plan.cuts, batch_sizes, tuple(phases))


def _check_alike(datasets: Sequence[DataSet], seq_len: int) -> None:
    """DataError if rows cannot be cut to `seq_len`, a source has no rows, or the tokenizers differ."""
    first = datasets[0].manifest
    for number, dataset in enumerate(datasets):
        manifest = dataset.manifest
        if manifest.row_tokens % seq_len:
            raise DataError(
                f"model.seq_len ({seq_len}) must divide the rows of data.sources[{number}] {dataset.address} "
                f"({manifest.row_tokens} tokens); repack them: keepstep data repack {dataset.address} --seq-len "
                f"{seq_len} --out DIR"
            )
        if manifest.tokenizer != first.tokenizer:
            raise DataError(
                f"data.sources[{number}] {dataset.address} was built with another tokenizer than data.sources[0] "
                f"{datasets[0].address}; build both with the same tokenizer"
            )
        if not manifest.splits[TRAIN].rows:
            raise DataError(
                f"data.sources[{number}] {dataset.address} has no rows in its train split; remove it from data.sources"
            )
