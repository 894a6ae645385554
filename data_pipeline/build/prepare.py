"""Builds a data set: inputs to tasks, tasks to documents in tokens, documents to rows, rows to shards, and a manifest.

Everything is written to `OUT.work` and `OUT.building` beside the output, which gets its name by one rename at the end.
Killed at any point and started again, the build goes on, and its output is the same byte for byte, whatever the number
and kind of workers.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.build.folder import begin, building_folder, drop_if_worthless, finish, finished, tokenizer_folder
from data_pipeline.build.packing import Packing
from data_pipeline.build.rows import GROUP_TOKENS, Group, describe, group_tasks, make_group, plan_shards, write_rows
from data_pipeline.build.selection import Selected, select_documents
from data_pipeline.build.tokenizing import TokenizeOptions, run_task, task_files
from data_pipeline.build.workers import Pool, open_pool
from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import (
    TRAIN,
    VALIDATION,
    Manifest,
    Shard,
    Split,
)
from data_pipeline.shards.shard_file import Compression, ShardShape
from data_pipeline.sources.files import InputFile, Task
from data_pipeline.sources.inputs import cut_into_tasks, list_inputs
from data_pipeline.sources.readers import cuts
from data_pipeline.sources.records import ReadOptions
from data_pipeline.tokenizers.tokenizer import find_tokenizer, hashes, load_tokenizer, tokenizer_files

BLOCK_BYTES = 256 << 10
SHARD_BYTES = 512 << 20


@dataclass(frozen=True)
class BuildOptions:
    """All that decides the output, besides the inputs and the tokenizer."""

    seq_len: int = 1024
    packing: Packing = "best-fit"
    compression: Compression = "none"
    validation_share: float = 0.005
    deduplicate: bool = False
    read: ReadOptions = field(default_factory=ReadOptions)
    min_characters: int = 0
    max_characters: int | None = None
    filters: tuple[str, ...] = ()
    task_bytes: int | None = None
    """Small files are read together up to this size, and large ones are cut at it; null: by the size of the input."""
    group_tokens: int = GROUP_TOKENS
    shard_bytes: int = SHARD_BYTES
    block_bytes: int = BLOCK_BYTES

    def block_rows(self, token_bytes: int) -> int:
        return max(1, self.block_bytes // (self.seq_len * token_bytes))

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Progress:
    """How far a stage is. What was done before this start is in `done`, but not in the amounts."""

    stage: str
    done: int
    total: int
    bytes: int
    documents: int
    tokens: int
    seconds: float
    seconds_left: float | None = None


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class _Plan:
    """What a build will do, the same on every machine that takes part."""

    files: list[InputFile]
    tasks: list[Task]
    options: BuildOptions
    tokenizer: dict[str, str]
    vocab_size: int
    end_of_document: int

    @property
    def token_bytes(self) -> int:
        return 2 if self.vocab_size <= 1 << 16 else 4

    @property
    def content(self) -> dict[str, Any]:
        files = xxhash.xxh3_128_hexdigest(json.dumps([[file.address, file.size] for file in self.files]).encode())
        return {"options": self.options.as_json(), "tokenizer": self.tokenizer, "files": files}

    @property
    def hash(self) -> str:
        return xxhash.xxh3_128_hexdigest(json.dumps(self.content, sort_keys=True).encode())

    def task_size(self, task: Task) -> int:
        return sum((p.end - p.start) if p.end is not None else self.files[p.file].size or 0 for p in task)


def build_dataset(
    inputs: Sequence[str],
    out: Path,
    tokenizer: str | Path,
    options: BuildOptions,
    *,
    end_of_document: str | None = None,
    workers: int = 1,
    pool: Pool | None = None,
    share: tuple[int, int] | None = None,
    report: Report = lambda progress: None,
) -> Manifest | None:
    """Build `out`. With `share` (i, n) only every n-th task from the i-th is tokenized, and nothing is finished."""
    tokenizer = find_tokenizer(tokenizer)
    files = tokenizer_files(tokenizer, end_of_document)
    loaded = load_tokenizer(tokenizer, end_of_document)
    listed = list_inputs(inputs)
    task_bytes = options.task_bytes or _fitting_task_bytes(listed)
    tasks = cut_into_tasks(listed, task_bytes, lambda file: cuts(file, options.read, task_bytes))
    plan = _Plan(listed, tasks, options, hashes(files), loaded.vocab_size, loaded.end_of_document)
    if (done := finished(out, plan.hash)) is not None:
        return done
    work = begin(out, plan.hash, plan.content, files)
    try:
        if pool is not None:
            return _build(plan, out, work, pool, share, report)
        with open_pool(workers) as opened:
            return _build(plan, out, work, opened, share, report)
    except DataError:
        drop_if_worthless(out, work)
        raise


def _fitting_task_bytes(files: Sequence[InputFile]) -> int:
    """Enough tasks to go round many workers, and not too many files."""
    total = sum(file.size or 0 for file in files)
    return min(max(total // 256, 4 << 20), 256 << 20)


def _build(
    plan: _Plan, out: Path, work: Path, pool: Pool, share: tuple[int, int] | None, report: Report
) -> Manifest | None:
    results = _tokenize(plan, work, pool, share, report)
    if share is not None:
        return None
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result["counts"])
    selected = select_documents(work, len(plan.tasks), plan.options.validation_share, plan.options.deduplicate, counts)
    bases = _records_before(plan.tasks, [result["records"] for result in results])
    shape = ShardShape(
        0, plan.options.seq_len, plan.options.block_rows(plan.token_bytes), plan.token_bytes, plan.options.compression
    )
    splits = write_splits(out, work, pool, selected, bases, shape, plan.end_of_document, plan.options, report)
    manifest = Manifest(
        row_tokens=shape.row_tokens,
        block_rows=shape.block_rows,
        token_bytes=shape.token_bytes,
        compression=shape.compression,
        vocab_size=plan.vocab_size,
        end_of_document=plan.end_of_document,
        tokenizer=plan.tokenizer,
        splits=splits,
        counts=dict(sorted(counts.items())),
        lengths=selected.histogram,
        options=plan.options.as_json(),
        plan=plan.hash,
    )
    finish(out, work, manifest, [file.address for file in plan.files])
    return manifest


def _tokenize(
    plan: _Plan, work: Path, pool: Pool, share: tuple[int, int] | None, report: Report
) -> list[dict[str, Any]]:
    options = TokenizeOptions(
        plan.options.read, plan.options.min_characters, plan.options.max_characters, plan.options.filters
    )
    folder = tokenizer_folder(work, plan.hash)
    dtype = "<u2" if plan.token_bytes == 2 else "<u4"
    numbers = range(len(plan.tasks)) if share is None else range(share[0], len(plan.tasks), share[1])
    results: dict[int, dict[str, Any]] = {n: r for n in numbers if (r := task_files(work, n).result()) is not None}
    pending = [number for number in numbers if number not in results]
    calls = [(run_task, (work, n, *_files_of(plan.tasks[n], plan.files), folder, options, dtype)) for n in pending]
    sizes = {number: plan.task_size(plan.tasks[number]) for number in numbers}
    started = time.monotonic()
    total_bytes = sum(sizes[number] for number in pending)
    done_bytes = documents = tokens = 0
    for index, result in pool.run(calls):
        number = pending[index]
        results[number] = result
        done_bytes += sizes[number]
        documents += result["counts"].get("documents read", 0)
        tokens += result["tokens"]
        seconds = time.monotonic() - started
        left = seconds * (total_bytes - done_bytes) / done_bytes if done_bytes else None
        report(Progress("tokenize", len(results), len(numbers), done_bytes, documents, tokens, seconds, left))
    return [results[number] for number in numbers]


def _files_of(task: Task, files: list[InputFile]) -> tuple[Task, dict[int, InputFile]]:
    return task, {part.file: files[part.file] for part in task}


def _records_before(tasks: Sequence[Task], records: Sequence[Sequence[int]]) -> list[dict[int, int]]:
    """For each task: file -> records of that file in earlier parts."""
    seen: Counter[int] = Counter()
    out = []
    for task, counts in zip(tasks, records, strict=True):
        out.append({part.file: seen[part.file] for part in task})
        for part, count in zip(task, counts, strict=True):
            seen[part.file] += count
    return out


def write_splits(
    out: Path,
    work: Path,
    pool: Pool,
    selected: Selected,
    bases: Sequence[dict[int, int]],
    shape: ShardShape,
    end_of_document: int,
    options: BuildOptions,
    report: Report,
) -> dict[str, Split]:
    """Pack and write the shards of both splits."""
    folder = building_folder(out) / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    splits = {}
    for split, tokens in ((TRAIN, selected.train_tokens), (VALIDATION, selected.validation_tokens)):
        ranges = group_tasks(tokens, options.group_tokens)
        calls = [
            (
                make_group,
                (work, f"{split}-{n:05d}", split, {t: bases[t] for t in tasks}, shape.row_tokens, options.packing),
            )
            for n, tasks in enumerate(ranges)
        ]
        groups: list[Group] = _in_order(pool, calls)
        ranges = plan_shards(work, groups, shape, options.shard_bytes)
        calls = [
            (write_rows, (work, folder / f"{split}-{n:05d}.shard", groups, rows, shape, end_of_document))
            for n, rows in enumerate(ranges)
        ]
        shards: list[Shard] = [Shard("", 0, 0, "")] * len(calls)
        for done, (number, shard) in enumerate(pool.run(calls), start=1):
            shards[number] = shard
            tokens_done = sum(shard.rows for shard in shards) * shape.row_tokens
            written = sum(shard.bytes for shard in shards)
            seconds = time.monotonic() - started
            report(Progress(f"write {split}", done, len(calls), written, 0, tokens_done, seconds))
        splits[split] = describe(groups, shards, shape.row_tokens)
    return splits


def _in_order(pool: Pool, calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    results = dict(pool.run(calls))
    return [results[number] for number in range(len(calls))]
