"""The stream of batches of a run: the plan says which rows make a step, and this rank reads its part of them.

Nothing depends on the number of ranks or on reading ahead: sample i of step s is global sample s * G + i, and rank r of
R takes those with g % R == r. To resume is to start at another step.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.shards.cache import BlockCache
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import TRAIN, VALIDATION
from data_pipeline.shards.rows_reader import RowReader
from data_pipeline.shards.shard_file import Rows
from data_pipeline.stream.assemble import batches, find_pieces
from data_pipeline.stream.batch import Batch
from data_pipeline.stream.counters import Counts, add, count, from_json, to_json
from data_pipeline.stream.mixture import Samples, joined
from data_pipeline.stream.order import Indices
from data_pipeline.stream.plan import (
    check_place,
    check_unchanged,
    describe,
    plan_sources,
    rank_samples,
    with_weights,
)
from data_pipeline.stream.prefetch import Prefetch

STATE_VERSION = 1
PLAN_SAMPLES = 4096
"""Samples of this rank that are located at once."""
GROUP_TOKENS = 1 << 18
"""Tokens that are read and assembled at once, if that many may be read ahead."""
UNCOUNTED_GROUPS = 64
"""Groups given out whose samples are not counted yet: counting many at once is cheap."""


class Stream:
    """Context manager; `close` ends the thread that reads ahead."""

    def __init__(self, config: DataConfig, *, seq_len: int) -> None:
        self._config, self._seq_len = config, seq_len
        self._datasets = [DataSet(source.path, source.mirror) for source in config.sources]
        self._plan = plan_sources(config, self._datasets, seq_len)
        manifest = self._datasets[0].manifest
        self.vocab_size: int = manifest.vocab_size
        self.end_of_document: int = manifest.end_of_document
        self.tokenizer_dir: Path = self._datasets[0].tokenizer_dir()
        self.source_names: tuple[str, ...] = tuple(Path(source.path).name for source in config.sources)
        prints = [dataset.manifest.fingerprint for dataset in self._datasets]
        self.fingerprint: str = xxhash.xxh3_128_hexdigest(" ".join(prints).encode())
        self.cache = BlockCache(int(config.cache_gib * 2**30))
        self._train = self._readers(TRAIN, 0, config.on_bad_block == "quarantine")
        self._validation = self._readers(VALIDATION, len(self._train), False)
        self._restored: dict[str, Any] | None = None
        self._agreed = 0  # quarantined blocks that all ranks know of
        self._rank = (0, 1)
        self._counts: Counts = {}
        self._recent: deque[tuple[int, int, Samples]] = deque()  # first step, steps, samples: given out, not counted
        self._running: Prefetch[Any] | None = None

    def _readers(self, split: str, first_source: int, quarantine: bool) -> list[RowReader]:
        return [
            RowReader(dataset, split, first_source + number, self.cache, quarantine)
            for number, dataset in enumerate(self._datasets)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop_reading()
        for dataset in self._datasets:
            dataset.close()

    def _stop_reading(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def steps(
        self, *, first_step: int, global_batch_size: int, micro_batch_size: int, rank: int, world_size: int
    ) -> Iterator[list[Batch]]:
        """Endless: this rank's micro batches of step `first_step`, of the next, and so on. One at a time."""
        if global_batch_size % (micro_batch_size * world_size):
            raise DataError(
                f"train.global_batch_size ({global_batch_size}) must be a multiple of train.micro_batch_size "
                f"({micro_batch_size}) x data-parallel ranks ({world_size})"
            )
        self._stop_reading()
        self._begin(first_step, global_batch_size, rank, world_size)
        micro_batches = global_batch_size // (micro_batch_size * world_size)
        ahead = self._config.prefetch_batches
        at_once = min(ahead, GROUP_TOKENS // (micro_batch_size * self._seq_len))
        steps = max(1, at_once // micro_batches)  # read at once
        groups = self._groups(first_step, steps, micro_batch_size)
        if ahead:
            self._running = Prefetch(groups, depth=max(1, ahead // (micro_batches * steps)))
            groups = self._running
        return self._given_out(groups, first_step, micro_batches)

    def _begin(self, first_step: int, global_batch_size: int, rank: int, world_size: int) -> None:
        _keep_memory()
        saved, self._restored = self._restored, None
        if saved is not None:
            check_place(saved, first_step, global_batch_size)
        past = saved["weights"] if saved is not None else None
        self._plan = with_weights(self._plan, self._config, global_batch_size, first_step * global_batch_size, past)
        self._rank = (rank, world_size)
        self._counts = from_json(saved["counters"]) if saved is not None and rank == 0 else {}
        self._recent.clear()

    def _given_out(
        self, groups: Iterator[tuple[Samples, list[Batch]]], first_step: int, micro_batches: int
    ) -> Iterator[list[Batch]]:
        step = first_step
        for samples, read in groups:
            steps = len(read) // micro_batches
            self._recent.append((step, steps, samples))
            for start in range(0, len(read), micro_batches):
                yield read[start : start + micro_batches]
            step += steps
            if len(self._recent) > UNCOUNTED_GROUPS:
                self._count_before(step - 2 * steps)

    def _groups(self, first_step: int, most_steps: int, micro_batch_size: int) -> Iterator[tuple[Samples, list[Batch]]]:
        """The samples of some steps at a time, read. Few at first, so that the first batch is there soon."""
        rank, world_size = self._rank
        rows_per_step = self._plan.global_batch_size // world_size
        most_located = max(most_steps, PLAN_SAMPLES // rows_per_step)
        step, located_steps, steps = first_step, 1, 1
        while True:
            sample = step * self._plan.global_batch_size
            located = self._plan.locate(rank_samples(sample, rows_per_step * located_steps, rank, world_size))
            done = 0
            while done < located_steps:
                upto = min(done + steps, located_steps)
                samples = located.part(slice(done * rows_per_step, upto * rows_per_step))
                yield samples, self._read(samples, micro_batch_size)
                self._release((step + upto) * self._plan.global_batch_size)
                done, steps = upto, min(2 * steps, most_steps)
            step += located_steps
            located_steps = min(2 * located_steps, most_located)

    def _read(self, samples: Samples, micro_batch_size: int) -> list[Batch]:
        sources = np.unique(samples.source).tolist()
        if len(sources) == 1:
            tokens, used = self._rows(sources[0], samples.row, samples.lane, samples.window)
        else:
            tokens = np.empty((len(samples.row), self._seq_len), self._train[0].shape.dtype)
            used = np.empty(len(samples.row), np.int64)
            for source in sources:
                chosen = np.flatnonzero(samples.source == source)
                tokens[chosen], used[chosen] = self._rows(
                    source, samples.row[chosen], samples.lane[chosen], samples.window[chosen]
                )
        return batches(find_pieces(tokens, used, self.end_of_document, samples), micro_batch_size)

    def _rows(self, source: int, rows: Indices, lanes: Indices, windows: Indices) -> tuple[Rows, NDArray[np.int64]]:
        return self._train[source].cut_rows(rows, self._plan.cuts[source], lanes, windows)

    def _release(self, next_sample: int) -> None:
        """Drop blocks from the cache whose windows all lie before `next_sample` on this rank's lanes."""
        for source, order in enumerate(self._plan.orders):
            if self._train[source].cached and order.blocks > 1:
                first = self._plan.windows_passed(source, next_sample, *self._rank)
                self.cache.release(source, lambda lane, window, first=first: bool(window < first[lane]))

    def validation(self, *, sequences: int, micro_batch_size: int, rank: int, world_size: int) -> Iterator[Batch]:
        """The first rows of the validation split, sources in turn; the last batches padded with rows without labels."""
        rows = self._validation_rows(sequences)
        for start in range(0, len(rows), micro_batch_size * world_size):
            first = start + rank * micro_batch_size
            mine = rows[first : first + micro_batch_size]
            tokens = np.full((micro_batch_size, self._seq_len), self.end_of_document, np.uint32)
            used, zeros = np.zeros(micro_batch_size, np.int64), np.zeros(micro_batch_size, np.int64)
            sources, numbers = np.zeros(micro_batch_size, np.int32), np.full(micro_batch_size, -1, np.int64)
            for place, (source, row) in enumerate(mine):
                one, in_use = self._validation[source].cut_rows(
                    np.array([row]), self._plan.cuts[source], zeros[:1], zeros[:1]
                )
                tokens[place], used[place] = one[0], in_use[0]
                sources[place], numbers[place] = source, first + place
            samples = Samples(numbers, sources, zeros, zeros, zeros, zeros)
            yield from batches(find_pieces(tokens, used, self.end_of_document, samples), micro_batch_size)

    def _validation_rows(self, sequences: int) -> list[tuple[int, int]]:
        """(source, row), sources in turn."""
        sizes = [reader.rows * cuts for reader, cuts in zip(self._validation, self._plan.cuts, strict=True)]
        rows = [(row, source) for source, size in enumerate(sizes) for row in range(min(size, sequences))]
        return [(source, row) for row, source in sorted(rows)[:sequences]]

    def _count_before(self, step: int) -> None:
        """Count the samples of groups of steps that end at `step` or earlier."""
        done = []
        while self._recent and self._recent[0][0] + self._recent[0][1] <= step:
            done.append(self._recent.popleft()[2])
        if done:
            self._counts = add(self._counts, count(joined(done)))

    def state(self, step: int) -> dict[str, Any]:
        """What this rank has used in all steps before `step`, and what a resume needs. JSON."""
        self._count_before(step)
        counts = self._counts
        for first, steps, samples in self._recent:
            done = min(max(step - first, 0), steps)
            counts = add(counts, count(samples.part(slice(0, len(samples.sample) // steps * done))))
        sample = step * self._plan.global_batch_size
        return {
            "version": STATE_VERSION,
            "rank": self._rank[0],
            "world_size": self._rank[1],
            "step": step,
            "samples": sample,
            "global_batch_size": self._plan.global_batch_size,
            "seq_len": self._seq_len,
            "seed": self._config.seed,
            "sources": [describe(dataset) for dataset in self._datasets],
            "weights": self._plan.weight_log(sample),
            "quarantined": [
                [source, block, why]
                for source, reader in enumerate(self._train)
                for block, why in sorted(reader.quarantined.items())
            ],
            "counters": to_json(counts),
        }

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """The states of all ranks of the run that saved. DataError if the data are not the same."""
        merged = merge_states(states)
        check_unchanged(merged, self._config.seed, self._seq_len, [describe(dataset) for dataset in self._datasets])
        self._stop_reading()
        self._restored = merged
        for source, block, why in merged["quarantined"]:
            self._train[source].quarantined[block] = why
        self._agreed = len(merged["quarantined"])

    @property
    def has_news(self) -> bool:
        """Whether this rank has quarantined a block since `restore`. The ranks must then exchange their states, restore
        them, and open their steps anew, so that all replace the same blocks from the same step on."""
        return sum(len(reader.quarantined) for reader in self._train) != self._agreed


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks together had used. Tensor-parallel peers read the same data and count once."""
    by_rank = {state["rank"]: state for state in states}
    counters = add(*(from_json(state["counters"]) for state in by_rank.values()))
    quarantined = sorted({tuple(entry[:2]): entry for state in states for entry in state["quarantined"]}.values())
    return {**states[0], "counters": to_json(counters), "quarantined": quarantined}


def _keep_memory() -> None:
    """Let glibc keep freed arrays of up to 16 MiB. It learns by the first that is freed; until then each such array
    is fetched from the system anew, and touching it costs more than filling it."""
    np.empty(16 << 20, np.uint8)


def open_stream(config: DataConfig, *, seq_len: int) -> Stream:
    """DataError if a data set is missing, damaged or does not fit."""
    return Stream(config, seq_len=seq_len)
