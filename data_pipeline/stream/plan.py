"""The plan of a run's samples: which source, epoch and row is each global sample, under all weights it has had.

The plan is the same on every rank and knows nothing of ranks; `rank_samples` says which samples are a rank's.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import TRAIN
from data_pipeline.stream.mixture import Phase, Samples, count_before, first_phase, locate, next_phase
from data_pipeline.stream.order import LANES, Indices, SourceOrder, source_order

log = logging.getLogger(__name__)

WeightLog = list[list[Any]]
"""[first sample, weights] of each phase, in order; JSON."""


@dataclass(frozen=True)
class Plan:
    seed: int
    orders: tuple[SourceOrder, ...]
    cuts: tuple[int, ...]
    """Rows of seq_len tokens in a stored row, by source."""
    global_batch_size: int = 0
    phases: tuple[Phase, ...] = field(default=(), repr=False)

    def locate(self, samples: Indices) -> Samples:
        return locate(self.phases, self.orders, self.seed, samples)

    def weight_log(self, before_sample: int) -> WeightLog:
        """Phases that began before this sample."""
        phases = [phase for phase in self.phases if phase.first_sample < max(before_sample, 1)]
        return [[phase.first_sample, list(phase.weights)] for phase in phases]

    def windows_passed(self, source: int, next_sample: int, rank: int, world_size: int) -> Indices:
        """[lanes of the source] the first window that this rank may still use from `next_sample` on."""
        order = self.orders[source]
        phase = next(phase for phase in reversed(self.phases) if phase.first_sample <= next_sample)
        lanes = np.arange(LANES, dtype=np.int64)
        counts = count_before(phase, source, next_sample)
        if order.lanes == 1:
            return counts.sum(keepdims=True) // order.window_slots
        within = counts * (LANES // order.lanes) + lanes // order.lanes
        if LANES % world_size == 0:  # other lanes are never this rank's
            within[lanes % world_size != rank] = np.iinfo(np.int64).max
        return within.reshape(-1, order.lanes).min(axis=0) // order.window_slots


def rank_samples(first_sample: int, number: int, rank: int, world_size: int) -> Indices:
    """Global samples of a rank: `number` of them from `first_sample` on, which is a multiple of `world_size`."""
    return first_sample + rank + np.arange(number, dtype=np.int64) * world_size


def plan_sources(config: DataConfig, datasets: Sequence[DataSet], seq_len: int) -> Plan:
    """The plan of a run that has not begun. DataError if the data sets do not fit each other or `seq_len`."""
    _check_alike(datasets, seq_len)
    manifests = [dataset.manifest for dataset in datasets]
    cuts = tuple(manifest.row_tokens // seq_len for manifest in manifests)
    orders = tuple(
        source_order(manifest.splits[TRAIN].rows * cut, manifest.block_rows * cut)
        for manifest, cut in zip(manifests, cuts, strict=True)
    )
    return Plan(config.seed, orders, cuts)


def with_weights(
    plan: Plan, config: DataConfig, global_batch_size: int, first_sample: int = 0, past: WeightLog | None = None
) -> Plan:
    """The plan of a run that starts at `first_sample`: with the weights that it had before, then the recipe's."""
    changes = [(0, tuple(source.weight for source in config.sources))]
    changes += [(change.step * global_batch_size, change.weights) for change in config.weight_changes]
    if past is not None:
        current = [weights for sample, weights in changes if sample <= first_sample][-1]
        later = [change for change in changes if change[0] > first_sample]
        changes = [(sample, tuple(weights)) for sample, weights in past]
        if changes[-1][1] != current:
            log.info("from sample %d the sources are weighted %s", first_sample, list(current))
            changes.append((first_sample, current))
        changes += later
    phases = [first_phase(changes[0][1])]
    for sample, weights in changes[1:]:
        phases.append(next_phase(phases[-1], sample, weights))
    return Plan(plan.seed, plan.orders, plan.cuts, global_batch_size, tuple(phases))


def _check_alike(datasets: Sequence[DataSet], seq_len: int) -> None:
    first = datasets[0].manifest
    for number, dataset in enumerate(datasets):
        manifest = dataset.manifest
        if manifest.row_tokens % seq_len:
            raise DataError(
                f"model.seq_len ({seq_len}) must divide the rows of data.sources[{number}] {dataset.address} "
                f"({manifest.row_tokens} tokens); cut them anew: keepstep data repack {dataset.address} --seq-len "
                f"{seq_len} --out DIR"
            )
        if manifest.tokenizer != first.tokenizer:
            raise DataError(
                f"data.sources[{number}] {dataset.address} was built with another tokenizer than data.sources[0] "
                f"{datasets[0].address}; build both with the same"
            )
        if not manifest.splits[TRAIN].rows:
            raise DataError(f"data.sources[{number}] {dataset.address} has no rows to train on")


def describe(dataset: DataSet) -> dict[str, Any]:
    """What a checkpoint remembers of a source, to say what changed."""
    manifest = dataset.manifest
    split = manifest.splits[TRAIN]
    return {
        "path": dataset.address,
        "fingerprint": manifest.fingerprint,
        "rows": split.rows,
        "row_tokens": manifest.row_tokens,
        "tokens": split.tokens,
        "documents": split.documents,
        "tokenizer": manifest.tokenizer,
    }


def check_unchanged(saved: dict[str, Any], seed: int, seq_len: int, sources: Sequence[dict[str, Any]]) -> None:
    """DataError that says what is not as it was when the state was saved."""
    for name, before, now in (
        ("data.seed", saved["seed"], seed),
        ("model.seq_len", saved["seq_len"], seq_len),
        ("number of data.sources", len(saved["sources"]), len(sources)),
    ):
        if before != now:
            raise DataError(
                f"the checkpoint was saved with {name} {before}, but now it is {now}: the order of samples would "
                f"change; set it back, or start a new run"
            )
    for number, (before, now) in enumerate(zip(saved["sources"], sources, strict=True)):
        if before["fingerprint"] != now["fingerprint"]:
            keys = [
                key for key in ("rows", "row_tokens", "tokens", "documents", "tokenizer") if before[key] != now[key]
            ]
            changes = "; ".join(f"{key} {before[key]} -> {now[key]}" for key in keys) or "the tokens themselves"
            raise DataError(
                f"data.sources[{number}] {now['path']} is not the data set that the checkpoint was trained on "
                f"({before['path']}, fingerprint {before['fingerprint']} -> {now['fingerprint']}): {changes}; "
                f"give the original data set, or start a new run"
            )


def check_place(saved: dict[str, Any], first_step: int, global_batch_size: int) -> None:
    """DataError if a run that resumes would begin at another sample than the one where it was saved."""
    if saved["samples"] != first_step * global_batch_size:
        raise DataError(
            f"the checkpoint stands at sample {saved['samples']} ({saved['step']} steps of "
            f"{saved['global_batch_size']}), but step {first_step} of train.global_batch_size {global_batch_size} "
            f"begins at sample {first_step * global_batch_size}; keep the batch size when resuming"
        )
