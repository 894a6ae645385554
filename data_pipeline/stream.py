"""The stream of batches of a run: the order says which rows make a step, and this rank reads its part of them.

Nothing depends on the number of ranks or on reading ahead: sample i of step s is global sample s * G + i, and rank r of
R takes those with g % R == r. To resume is to start at another step.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from data_pipeline.assemble import assemble, cut
from data_pipeline.batch import Batch
from data_pipeline.cache import BlockCache
from data_pipeline.config import DataConfig
from data_pipeline.counters import Counts, add, count, from_json, to_json
from data_pipeline.dataset import DataSet, RowReader
from data_pipeline.errors import DataError
from data_pipeline.manifest import HELD_OUT, TRAIN
from data_pipeline.mixture import Phase, Samples, counts_before, first_phase, locate, next_phase
from data_pipeline.order import LANES, Indices, SourceOrder, source_order
from data_pipeline.prefetch import ahead

log = logging.getLogger(__name__)

STATE_VERSION = 1
PLAN_SAMPLES = 4096
"""Samples of this rank that are located at once."""
GROUP_ROWS = 32
"""Rows that are read and assembled at once, if that many may be read ahead."""


class Stream:
    """Context manager; `close` ends the thread that reads ahead."""

    def __init__(self, config: DataConfig, *, seq_len: int) -> None:
        self._config, self._seq_len = config, seq_len
        self._cache = BlockCache(int(config.cache_gib * 2**30))
        self._datasets = [DataSet(source.path, source.mirror) for source in config.sources]
        _check_alike(self._datasets, seq_len)
        manifest = self._datasets[0].manifest
        self.vocab_size: int = manifest.vocab_size
        self.end_of_document: int = manifest.end_of_document
        self.tokenizer_dir: Path = self._datasets[0].tokenizer_dir()
        self.source_names: tuple[str, ...] = tuple(Path(source.path).name for source in config.sources)
        prints = [dataset.manifest.fingerprint for dataset in self._datasets]
        self.fingerprint: str = xxhash.xxh3_128_hexdigest(" ".join(prints).encode())
        quarantine = config.on_bad_block == "quarantine"
        self._train = self._readers(TRAIN, 0, quarantine)
        self._held_out = self._readers(HELD_OUT, len(self._train), False)
        self._cuts = [dataset.manifest.row_tokens // seq_len for dataset in self._datasets]
        self._orders: list[SourceOrder] = [
            source_order(reader.rows * cuts, dataset.manifest.block_rows * cuts)
            for reader, cuts, dataset in zip(self._train, self._cuts, self._datasets, strict=True)
        ]
        self._phases: list[Phase] = [first_phase([source.weight for source in config.sources])]
        self._restored: dict[str, Any] | None = None
        self._global_batch_size = 0
        self._counts: Counts = {}
        self._recent: deque[tuple[int, int, Samples]] = deque()  # first step, steps, samples
        self._running: list[Any] = []

    def _readers(self, split: str, first_source: int, quarantine: bool) -> list[RowReader]:
        return [
            RowReader(dataset, split, first_source + number, self._cache, quarantine)
            for number, dataset in enumerate(self._datasets)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for running in self._running:
            running.close()
        for dataset in self._datasets:
            dataset.close()

    def steps(
        self, *, first_step: int, global_batch_size: int, micro_batch_size: int, rank: int, world_size: int
    ) -> Iterator[list[Batch]]:
        """Endless: this rank's micro batches of step `first_step`, of the next, and so on."""
        if global_batch_size % (micro_batch_size * world_size):
            raise DataError(
                f"train.global_batch_size ({global_batch_size}) must be a multiple of train.micro_batch_size "
                f"({micro_batch_size}) x data-parallel ranks ({world_size})"
            )
        self._begin(first_step, global_batch_size, rank)
        micro_batches = global_batch_size // (micro_batch_size * world_size)
        wanted = min(self._config.prefetch_batches * micro_batch_size, GROUP_ROWS)
        steps_at_once = max(1, wanted // (micro_batches * micro_batch_size))
        groups = self._groups(first_step, global_batch_size, rank, world_size, steps_at_once)
        depth = self._config.prefetch_batches // (micro_batches * steps_at_once) if self._config.prefetch_batches else 0
        running = ahead(groups, max(1, depth)) if self._config.prefetch_batches else groups
        self._running.append(running)
        step = first_step
        for samples, whole in running:
            rows = len(samples.sample) // steps_at_once
            self._recent.append((step, steps_at_once, samples))
            for number in range(steps_at_once):
                yield [
                    cut(whole, slice(start, start + micro_batch_size))
                    for start in range(number * rows, (number + 1) * rows, micro_batch_size)
                ]
            step += steps_at_once
            self._fold(step - 2 * steps_at_once)

    def _begin(self, first_step: int, global_batch_size: int, rank: int) -> None:
        """Fix the phases: what the restored run did, then what the recipe says."""
        first_sample = first_step * global_batch_size
        phases = [first_phase([source.weight for source in self._config.sources])]
        changes = [(change.step * global_batch_size, change.weights) for change in self._config.weight_changes]
        if self._restored is not None:
            saved = self._restored
            if saved["samples"] != first_sample:
                raise DataError(
                    f"the checkpoint stands at sample {saved['samples']} ({saved['step']} steps of "
                    f"{saved['global_batch_size']}), but step {first_step} of train.global_batch_size "
                    f"{global_batch_size} begins at sample {first_sample}; keep the batch size when resuming"
                )
            current = [source.weight for source in self._config.sources]
            for sample, weights in changes:
                current = weights if sample <= first_sample else current
            log_of_weights = saved["weights"]
            phases = [first_phase(log_of_weights[0][1])]
            for sample, weights in log_of_weights[1:]:
                phases.append(next_phase(phases[-1], sample, weights))
            if list(phases[-1].weights) != list(current):
                log.info("from sample %d the sources are weighted %s", first_sample, list(current))
                phases.append(next_phase(phases[-1], first_sample, current))
            changes = [change for change in changes if change[0] > first_sample]
            self._counts = from_json(saved["counters"]) if rank == 0 else {}
        for sample, weights in changes:
            phases.append(next_phase(phases[-1], sample, weights))
        self._phases, self._global_batch_size = phases, global_batch_size
        self._recent.clear()

    def _groups(
        self, first_step: int, global_batch_size: int, rank: int, world_size: int, steps_at_once: int
    ) -> Iterator[tuple[Samples, Batch]]:
        rows_per_step = global_batch_size // world_size
        group = rows_per_step * steps_at_once
        planned = 1  # groups located at once; few at first, so that the first batch is there soon
        first = first_step * rows_per_step
        while True:
            samples = np.arange(first, first + group * planned, dtype=np.int64) * world_size + rank
            located = locate(self._phases, self._orders, self._config.seed, samples)
            for start in range(0, len(samples), group):
                part = located.part(slice(start, start + group))
                yield part, self._read(part)
            first += group * planned
            planned = min(planned * 2, max(1, PLAN_SAMPLES // group))
            self._release(first * world_size, rank, world_size)

    def _read(self, samples: Samples) -> Batch:
        """The rows of these samples, assembled."""
        manifest = self._datasets[0].manifest
        tokens = np.empty((len(samples.row), self._seq_len), np.dtype(f"<u{manifest.token_bytes}"))
        used = np.empty(len(samples.row), np.int64)
        for source in np.unique(samples.source).tolist():
            chosen = np.flatnonzero(samples.source == source)
            tokens[chosen], used[chosen] = self._rows(
                self._train[source],
                self._cuts[source],
                samples.row[chosen],
                samples.lane[chosen],
                samples.window[chosen],
            )
        return assemble(tokens, used, self.end_of_document, samples.source, samples.sample)

    def _rows(self, reader: RowReader, cuts: int, rows: Indices, lanes: Indices, windows: Indices) -> tuple[Any, Any]:
        """Tokens and numbers of used tokens of rows of seq_len tokens."""
        stored, part = np.divmod(rows, cuts)
        records = reader.gather(stored, lanes, windows)
        prefix = reader.shape.prefix
        used = np.ascontiguousarray(records[:, :prefix]).view("<u4")[:, 0].astype(np.int64)
        if cuts == 1:
            return records[:, prefix:], used
        tokens = records[:, prefix:].reshape(len(rows), cuts, self._seq_len)[np.arange(len(rows)), part]
        return tokens, np.clip(used - part * self._seq_len, 0, self._seq_len)

    def _release(self, next_sample: int, rank: int, world_size: int) -> None:
        """Drop blocks from the cache whose windows all lie before `next_sample` on this rank's lanes."""
        if not len(self._cache):
            return
        phase = next(phase for phase in reversed(self._phases) if phase.first_sample <= next_sample)
        ordinals = counts_before(phase, next_sample)
        lanes = np.arange(LANES)
        mine = lanes % world_size == rank if LANES % world_size == 0 else np.ones(LANES, bool)
        for source, order in enumerate(self._orders):
            if order.blocks == 1 or not self._train[source].cached:
                continue
            within = ordinals[source] * (LANES // order.lanes) + lanes // order.lanes
            within[~mine] = np.iinfo(np.int64).max
            now = within.reshape(-1, order.lanes).min(axis=0) // order.window_slots
            self._cache.release(source, lambda lane, window, now=now: bool(window < now[lane]))

    def held_out(self, *, sequences: int, micro_batch_size: int, rank: int, world_size: int) -> Iterator[Batch]:
        """The first rows of the held-out split, sources in turn; the last batches padded with rows without labels."""
        rows = self._held_out_rows(sequences)
        batches = -(-len(rows) // (micro_batch_size * world_size))
        for number in range(batches):
            first = (number * world_size + rank) * micro_batch_size
            mine = rows[first : first + micro_batch_size]
            tokens = np.full((micro_batch_size, self._seq_len), self.end_of_document, np.uint32)
            used, sources = np.zeros(micro_batch_size, np.int64), np.zeros(micro_batch_size, np.int32)
            numbers = np.full(micro_batch_size, -1, np.int64)
            for place, (source, row) in enumerate(mine):
                zero = np.zeros(1, np.int64)
                one = self._rows(self._held_out[source], self._cuts[source], np.array([row]), zero, zero)
                tokens[place], used[place], sources[place] = one[0][0], one[1][0], source
                numbers[place] = first + place
            yield assemble(tokens, used, self.end_of_document, sources, numbers)

    def _held_out_rows(self, sequences: int) -> list[tuple[int, int]]:
        """(source, row), sources in turn."""
        sizes = [reader.rows * cuts for reader, cuts in zip(self._held_out, self._cuts, strict=True)]
        rows = [(row, source) for source, size in enumerate(sizes) for row in range(min(size, sequences))]
        return [(source, row) for row, source in sorted(rows)[:sequences]]

    def _fold(self, before_step: int) -> None:
        """Count the samples of groups of steps that end at `before_step` or earlier."""
        while self._recent and self._recent[0][0] + self._recent[0][1] <= before_step:
            self._counts = add(self._counts, count(self._recent.popleft()[2]))

    def state(self, step: int) -> dict[str, Any]:
        """What this rank has used in all steps before `step`, and what a resume needs. JSON."""
        self._fold(step)
        counts = self._counts
        for first, steps, samples in self._recent:
            done = min(max(step - first, 0), steps)
            if done:
                counts = add(counts, count(samples.part(slice(0, len(samples.sample) // steps * done))))
        sample = step * self._global_batch_size
        return {
            "version": STATE_VERSION,
            "step": step,
            "samples": sample,
            "global_batch_size": self._global_batch_size,
            "seq_len": self._seq_len,
            "seed": self._config.seed,
            "sources": [_describe(dataset) for dataset in self._datasets],
            "weights": [
                [phase.first_sample, list(phase.weights)]
                for phase in self._phases
                if phase.first_sample < max(sample, 1)
            ],
            "quarantined": [
                [source, block, why]
                for source, reader in enumerate(self._train)
                for block, why in sorted(reader.quarantined.items())
            ],
            "counters": to_json(counts),
        }

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """The states of all ranks of the run that saved. DataError if the data are not the same."""
        first = states[0]
        _check_unchanged(first, self._config, [_describe(dataset) for dataset in self._datasets], self._seq_len)
        counters = add(*(from_json(state["counters"]) for state in states))
        self._restored = {**first, "counters": to_json(counters)}
        for state in states:
            for source, block, why in state["quarantined"]:
                self._train[source].quarantined[block] = why


def _describe(dataset: DataSet) -> dict[str, Any]:
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


def _check_alike(datasets: Sequence[DataSet], seq_len: int) -> None:
    first = datasets[0].manifest
    for number, dataset in enumerate(datasets):
        manifest = dataset.manifest
        if manifest.row_tokens % seq_len:
            raise DataError(
                f"model.seq_len ({seq_len}) must divide the rows of data.sources[{number}] {dataset.address} "
                f"({manifest.row_tokens} tokens); `keepstep data repack {dataset.address} --seq-len {seq_len}` cuts "
                f"them anew"
            )
        if manifest.tokenizer != first.tokenizer:
            raise DataError(
                f"data.sources[{number}] {dataset.address} was built with another tokenizer than data.sources[0] "
                f"{datasets[0].address}; build both with the same"
            )
        if not manifest.splits[TRAIN].rows:
            raise DataError(f"data.sources[{number}] {dataset.address} has no rows to train on")


def _check_unchanged(saved: dict[str, Any], config: DataConfig, sources: Sequence[dict], seq_len: int) -> None:
    for name, before, now in (
        ("data.seed", saved["seed"], config.seed),
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


def open_stream(config: DataConfig, *, seq_len: int) -> Stream:
    """DataError if a data set is missing, damaged or does not fit."""
    return Stream(config, seq_len=seq_len)
