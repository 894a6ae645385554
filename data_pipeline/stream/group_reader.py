"""Reads the batches of one rank, in groups of steps: many rows together, because calls for few rows are slow."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data_pipeline.batch_sizes import Changes, next_change, value_at
from data_pipeline.shards.cache import BlockCache
from data_pipeline.shards.rows_reader import RowReader
from data_pipeline.stream.assemble import batches, find_pieces
from data_pipeline.stream.batch import Batch
from data_pipeline.stream.mixture import Samples
from data_pipeline.stream.plan import Plan, rank_samples

PLAN_SAMPLES = 4096
"""Samples of this rank that are located together."""


@dataclass(frozen=True)
class GroupReader:
    """Reads the rows that a plan gives to one rank."""

    plan: Plan
    readers: Sequence[RowReader]
    """One reader for each source."""
    cache: BlockCache
    seq_len: int
    end_of_document: int
    rank: int
    world_size: int
    seq_lens: Changes = ()
    """Tokens of the rows that training gets, from a step on; none: `seq_len` always."""

    def read(self, first_step: int, together: int, micro_batch_size: int) -> Iterator[tuple[Samples, list[Batch]]]:
        """Groups of steps from `first_step` on, endlessly: their samples and their batches.

        A group has up to `together` micro batches, or else one step. All of its steps have the same batch size and
        sequence length. The first groups are small, so that the first batch comes soon. DataError if a block is
        damaged."""
        sizes = self.plan.batch_sizes
        step, next_located, steps = first_step, 1, 1
        while True:
            rows_per_step = sizes.size(step) // self.world_size
            most_steps = max(1, together * micro_batch_size // rows_per_step)
            located_steps = min(next_located, self._steps_alike(step))
            number = rows_per_step * located_steps
            located = self.plan.locate(rank_samples(sizes.first_sample(step), number, self.rank, self.world_size))
            done = 0
            while done < located_steps:
                upto = min(done + min(steps, most_steps), located_steps)
                samples = located.part(slice(done * rows_per_step, upto * rows_per_step))
                yield samples, self._read(samples, micro_batch_size, self._seq_len(step))
                self._release(sizes.first_sample(step + upto))
                done, steps = upto, min(2 * steps, most_steps)
            step += located_steps
            next_located = min(2 * next_located, max(most_steps, PLAN_SAMPLES // rows_per_step))

    def _steps_alike(self, step: int) -> int:
        """Number of steps from this one on that have its batch size and its sequence length."""
        changes = [next_change(self.plan.batch_sizes.log, step), next_change(self.seq_lens, step)]
        return min((change - step for change in changes if change is not None), default=sys.maxsize)

    def _seq_len(self, step: int) -> int:
        return value_at(((0, self.seq_len), *self.seq_lens), step)

    def _read(self, samples: Samples, micro_batch_size: int, seq_len: int) -> list[Batch]:
        """The batches of some samples. Rows of `self.seq_len` tokens become several of `seq_len`, one after another."""
        sources = np.unique(samples.source).tolist()
        if len(sources) == 1:
            (source,) = sources
            tokens, used = self.readers[source].cut_rows(
                samples.row, self.plan.cuts[source], samples.lane, samples.window
            )
        else:
            tokens = np.empty((len(samples.row), self.seq_len), self.readers[0].shape.dtype)
            used = np.empty(len(samples.row), np.int64)
            for source in sources:
                chosen = np.flatnonzero(samples.source == source)
                tokens[chosen], used[chosen] = self.readers[source].cut_rows(
                    samples.row[chosen], self.plan.cuts[source], samples.lane[chosen], samples.window[chosen]
                )
        parts = self.seq_len // seq_len
        if parts > 1:
            tokens, samples = tokens.reshape(-1, seq_len), samples.repeated(parts)
            used = np.clip(used[:, None] - np.arange(parts) * seq_len, 0, seq_len).reshape(-1)
        return batches(find_pieces(tokens, used, self.end_of_document, samples), micro_batch_size * parts)

    def _release(self, next_sample: int) -> None:
        """Drops cached blocks that this rank does not need from `next_sample` on."""
        for source, order in enumerate(self.plan.orders):
            if self.readers[source].uses_cache and order.blocks > 1:
                first = self.plan.first_windows(source, next_sample, self.rank, self.world_size)
                self.cache.release(source, lambda lane, window, first=first: bool(window < first[lane]))
