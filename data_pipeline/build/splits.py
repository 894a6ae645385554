"""Packs the chosen documents of a build and writes the shards, one split at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.build.folder import building_folder
from data_pipeline.build.groups import Group, group_tasks, make_group
from data_pipeline.build.options import BuildOptions
from data_pipeline.build.rows import plan_shards, write_rows
from data_pipeline.build.workers import Call, Pool
from data_pipeline.progress import Progress
from data_pipeline.shards.manifest import Shard, Split
from data_pipeline.shards.shard_file import ShardShape


@dataclass(frozen=True)
class SplitWriter:
    """Packs and writes the splits of the build whose output is `out`."""

    out: Path
    work: Path
    shape: ShardShape
    end_of_document: int
    options: BuildOptions
    pool: Pool
    progress: Progress

    def write(self, split: str, tokens: Sequence[int], bases: Sequence[Mapping[int, int]]) -> Split:
        """Packs and writes one split.

        `tokens` has the split's tokens of each task, `bases` the number of earlier records of each of its files."""
        groups = self._pack(split, tokens, bases)
        shards = self._write(split, groups)
        return _describe(groups, shards, self.shape.row_tokens)

    def _pack(self, split: str, tokens: Sequence[int], bases: Sequence[Mapping[int, int]]) -> list[Group]:
        ranges = group_tasks(tokens, self.options.group_tokens)
        row_tokens, packing = self.shape.row_tokens, self.options.packing
        calls = [
            (make_group, (self.work, f"{split}-{n:05d}", split, {t: bases[t] for t in tasks}, row_tokens, packing))
            for n, tasks in enumerate(ranges)
        ]
        return self._run(f"packing the {split} split", calls, sum(tokens), lambda group: group.tokens)

    def _write(self, split: str, groups: Sequence[Group]) -> list[Shard]:
        folder = building_folder(self.out) / "shards"
        folder.mkdir(parents=True, exist_ok=True)
        ranges = plan_shards(self.work, groups, self.shape, self.options.shard_bytes)
        calls = [
            (
                write_rows,
                (self.work, folder / f"{split}-{n:05d}.shard", groups, rows, self.shape, self.end_of_document),
            )
            for n, rows in enumerate(ranges)
        ]
        row_tokens = self.shape.row_tokens
        total = sum(map(len, ranges)) * row_tokens
        return self._run(f"writing the {split} split", calls, total, lambda shard: shard.rows * row_tokens)

    def _run(self, stage: str, calls: Sequence[Call], total: int, tokens_of: Callable[[Any], int]) -> list[Any]:
        """The results of the calls, in the order of the calls."""
        results: dict[int, Any] = {}
        with self.progress(stage, total, "tokens") as advance:
            for number, result in self.pool.run(calls):
                results[number] = result
                advance(tokens_of(result))
        return [results[number] for number in range(len(calls))]


def _describe(groups: Sequence[Group], shards: Sequence[Shard], row_tokens: int) -> Split:
    rows = sum(group.rows for group in groups)
    tokens = sum(group.tokens for group in groups)
    return Split(
        rows=rows,
        documents=sum(group.documents for group in groups),
        tokens=tokens,
        padding=rows * row_tokens - tokens,
        documents_cut=sum(group.documents_cut for group in groups),
        shards=tuple(shards),
        groups=tuple(np.cumsum([0, *(group.rows for group in groups)])[:-1].tolist()),
    )
