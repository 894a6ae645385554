"""The stream of a run's batches: the plan determines the rows of each step, and this rank reads its part of them.

The order depends neither on the number of ranks nor on reading ahead: sample i of step s is global sample s * G + i,
and rank r of R takes the samples with g % R == r. To resume, a run starts at another step.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from data_pipeline.batch_sizes import BatchSizes, Changes
from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.shards.cache import BlockCache
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import TRAIN, VALIDATION
from data_pipeline.shards.rows_reader import RowReader
from data_pipeline.stream.batch import Batch
from data_pipeline.stream.counters import from_json, to_json
from data_pipeline.stream.group_reader import GroupReader
from data_pipeline.stream.mixture import Samples
from data_pipeline.stream.overlap import check_splits
from data_pipeline.stream.plan import plan_sources, with_weights
from data_pipeline.stream.prefetch import Prefetch
from data_pipeline.stream.saved_state import (
    STATE_VERSION,
    check_first_sample,
    check_quarantined,
    check_unchanged,
    describe,
    merge_states,
)
from data_pipeline.stream.source_names import source_names
from data_pipeline.stream.usage import Usage
from data_pipeline.stream.validation import validation_batches

READ_TOKENS = 1 << 18
"""Tokens that are read and assembled together, if that many may be read ahead."""


class Stream:
    """The batches of a run. A context manager: `close` stops the thread that reads ahead."""

    def __init__(self, config: DataConfig, *, seq_len: int) -> None:
        """Opens the data sets. DataError if one is missing, damaged or does not fit `seq_len` and the others."""
        self._config, self._seq_len = config, seq_len
        self._datasets = [DataSet(source.path, source.mirror) for source in config.sources]
        self._plan = plan_sources(config, self._datasets, seq_len)
        check_splits(self._datasets)
        manifest = self._datasets[0].manifest
        self.vocab_size: int = manifest.vocab_size
        self.end_of_document: int = manifest.end_of_document
        self.tokenizer_dir: Path = self._datasets[0].tokenizer_dir()
        """A local folder with the tokenizer's files."""
        self.source_names: tuple[str, ...] = source_names([source.path for source in config.sources])
        """A name for each source, all different."""
        fingerprints = [dataset.manifest.fingerprint for dataset in self._datasets]
        self.fingerprint: str = xxhash.xxh3_128_hexdigest(" ".join(fingerprints).encode())
        """Hash of the fingerprints of all sources."""
        self.cache = BlockCache(int(config.cache_gib * 2**30))
        self._train = self._readers(TRAIN, 0, config.on_bad_block == "quarantine")
        self._validation = self._readers(VALIDATION, len(self._train), False)
        self._restored: dict[str, Any] | None = None
        self._agreed = 0  # number of quarantined blocks that all ranks know
        self._rank = (0, 1)
        self._usage = Usage()
        self._running: Prefetch[Any] | None = None

    def check_tokenizers(self) -> None:
        """DataError if a data set's manifest and its tokenizer disagree on the vocabulary or on the end of a document.

        Loads every tokenizer, so one rank does it for all."""
        for dataset in self._datasets:
            dataset.tokenizer()

    def _readers(self, split: str, first_source: int, allow_quarantine: bool) -> list[RowReader]:
        return [
            RowReader(dataset, split, first_source + number, self.cache, allow_quarantine)
            for number, dataset in enumerate(self._datasets)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the thread that reads ahead and deletes downloaded files."""
        self._stop_reading()
        for dataset in self._datasets:
            dataset.close()

    def _stop_reading(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def steps(
        self,
        *,
        first_step: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        batch_changes: Changes = (),
        seq_lens: Changes = (),
    ) -> Iterator[list[Batch]]:
        """This rank's micro batches of each step from `first_step` on, endlessly. A new call ends the one before.

        `batch_changes` and `seq_lens`: the global batch size and the tokens of a row from later steps on. Where rows
        are shorter, a micro batch has as many more of them, so it has the same tokens. DataError if the batch sizes do
        not fit, or a resumed run would begin at another sample."""
        for size in (global_batch_size, *(size for _, size in batch_changes)):
            if size % (micro_batch_size * world_size):
                raise DataError(
                    f"train.global_batch_size ({size}) must be a multiple of train.micro_batch_size "
                    f"({micro_batch_size}) x data-parallel ranks ({world_size})"
                )
        self._stop_reading()
        sizes = self._begin(first_step, global_batch_size, batch_changes, rank, world_size)
        micro_batches = sizes.size(first_step) // (micro_batch_size * world_size)
        ahead = self._config.prefetch_batches
        together = min(ahead, READ_TOKENS // (micro_batch_size * self._seq_len))
        reader = GroupReader(
            self._plan, self._train, self.cache, self._seq_len, self.end_of_document, *self._rank, seq_lens
        )
        groups = reader.read(first_step, together, micro_batch_size)
        if ahead:
            steps = max(1, together // micro_batches)
            self._running = Prefetch(groups, depth=max(1, ahead // (micro_batches * steps)))
            groups = self._running
        return self._steps_of(groups, first_step, micro_batch_size * world_size)

    def _begin(
        self, first_step: int, global_batch_size: int, changes: Changes, rank: int, world_size: int
    ) -> BatchSizes:
        _keep_freed_memory()
        saved, self._restored = self._restored, None
        sizes = BatchSizes.of(global_batch_size, saved, changes)
        if saved is not None:
            check_first_sample(saved, first_step, sizes)
        past = saved["weights"] if saved is not None else None
        self._plan = with_weights(self._plan, self._config, sizes, sizes.first_sample(first_step), past)
        self._rank = (rank, world_size)
        # Rank 0 alone continues the counters of the run before, so that the sum over all ranks is right.
        self._usage = Usage(from_json(saved["counters"]) if saved is not None and rank == 0 else None)
        return sizes

    def _steps_of(
        self, groups: Iterator[tuple[Samples, list[Batch]]], first_step: int, sequences: int
    ) -> Iterator[list[Batch]]:
        """The micro batches of each step. `sequences`: those of one micro batch on all ranks together."""
        sizes, step = self._plan.batch_sizes, first_step
        for samples, read in groups:
            micro_batches = sizes.size(step) // sequences
            steps = len(read) // micro_batches
            self._usage.add(step, steps, samples)
            for start in range(0, len(read), micro_batches):
                yield read[start : start + micro_batches]
            step += steps

    def validation(self, *, sequences: int, micro_batch_size: int, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's batches of the first `sequences` rows of the validation split, taken from the sources in turn.

        Every rank gets the same number of batches. Missing rows at the end are padding without labels."""
        return validation_batches(
            self._validation,
            self._plan.cuts,
            sequences=sequences,
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            end_of_document=self.end_of_document,
        )

    def first_sample(self, step: int) -> int:
        """Global sample at which a step begins, under the batch sizes that the run has had."""
        return self._plan.batch_sizes.first_sample(step)

    @property
    def has_validation(self) -> bool:
        """Whether any source has rows in its validation split."""
        return any(reader.rows for reader in self._validation)

    def state(self, step: int) -> dict[str, Any]:
        """This rank's state before `step`, as JSON values: the samples used, and what a resume needs."""
        sizes = self._plan.batch_sizes
        sample = sizes.first_sample(step)
        return {
            "version": STATE_VERSION,
            "rank": self._rank[0],
            "world_size": self._rank[1],
            "step": step,
            "samples": sample,
            "global_batch_size": sizes.size(step),
            "batch_sizes": sizes.as_json(step),
            "seq_len": self._seq_len,
            "seed": self._config.seed,
            "sources": [describe(dataset) for dataset in self._datasets],
            "weights": self._plan.weight_log(sample),
            "quarantined": [
                [source, block, reason]
                for source, reader in enumerate(self._train)
                for block, reason in sorted(reader.quarantine.reasons.items())
            ],
            "counters": to_json(self._usage.before(step)),
        }

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Continues from the states of all ranks that saved. The next call of `steps` must begin at their step.

        DataError that names what changed, if the data are not the same."""
        merged = merge_states(states)
        check_unchanged(merged, self._config.seed, self._seq_len, [describe(dataset) for dataset in self._datasets])
        self._stop_reading()
        self._restored = merged
        for source, block, reason in merged["quarantined"]:
            check_quarantined((source, block), [reader.blocks for reader in self._train])
            self._train[source].quarantine.reasons[block] = reason
        self._agreed = len(merged["quarantined"])

    @property
    def has_new_quarantine(self) -> bool:
        """Whether this rank has quarantined a block since `restore`.

        If so, the ranks must exchange their states, restore them and call `steps` again. Then all ranks replace the
        same blocks from the same step on."""
        return sum(len(reader.quarantine.reasons) for reader in self._train) != self._agreed


def _keep_freed_memory() -> None:
    """Makes glibc keep freed arrays of up to 16 MiB for reuse. It raises its limit when the first such array is freed.

    Without this, each array is fetched from the system again, and the page faults cost more than filling it."""
    np.empty(16 << 20, np.uint8)


def open_stream(config: DataConfig, *, seq_len: int) -> Stream:
    """The stream of a run. DataError if a data set is missing, damaged or does not fit."""
    return Stream(config, seq_len=seq_len)
