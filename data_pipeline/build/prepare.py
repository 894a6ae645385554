"""Builds a data set: inputs to tasks, tasks to tokens, documents to rows, rows to shards, and a manifest.

Everything is written to `OUT.work` and `OUT.building` beside the output, which gets its name by one rename at the end.
A build that was killed at any point continues when it is started again. Its output is the same byte for byte, whatever
the number and kind of workers.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_pipeline.build.folder import (
    begin,
    building_folder,
    delete_if_empty,
    finish,
    finished,
    tokenizer_folder,
)
from data_pipeline.build.lock import build_lock
from data_pipeline.build.options import BuildOptions
from data_pipeline.build.part_report import long_documents, merge_reports
from data_pipeline.build.plan import Plan, make_plan
from data_pipeline.build.selection import Selected, select_documents
from data_pipeline.build.splits import SplitWriter
from data_pipeline.build.tokenizing import LOST, UNKNOWN, TokenizeOptions, run_task, task_files
from data_pipeline.build.workers import Pool, open_pool
from data_pipeline.errors import DataError
from data_pipeline.progress import Progress, silent
from data_pipeline.shards.document_hashes import write_hashes
from data_pipeline.shards.manifest import SPLITS, Manifest
from data_pipeline.shards.manifest_file import encode_files
from data_pipeline.sources.tasks import Task
from data_pipeline.tokenizers.find import find_tokenizer
from data_pipeline.tokenizers.tokenizer import hashes, load_tokenizer, tokenizer_files

log = logging.getLogger(__name__)


def build_dataset(
    inputs: Sequence[str],
    out: Path,
    tokenizer: str | Path,
    options: BuildOptions,
    *,
    end_of_document: str | None = None,
    beginning_of_document: str | None = None,
    validation: Sequence[str] = (),
    allow_unusable: bool = False,
    workers: int = 1,
    pool: Pool | None = None,
    share: tuple[int, int] | None = None,
    progress: Progress = silent,
) -> Manifest | None:
    """Builds the data set `out` and returns its manifest; a finished one is not built again.

    `validation` names inputs for the validation split; without it, a share of the documents is chosen. `pool` replaces
    `workers` processes. With `share` (i, n) only every n-th task from the i-th is tokenized, and the result is None.
    DataError if the inputs cannot be read, if a file has no usable document (unless `allow_unusable`), if another build
    of `out` is running, or if `out` is something else."""
    tokenizer = find_tokenizer(tokenizer)
    files = tokenizer_files(tokenizer, end_of_document, beginning_of_document)
    loaded = load_tokenizer(tokenizer, end_of_document, beginning_of_document)
    plan = make_plan(inputs, options, hashes(files), loaded.vocab_size, loaded.end_of_document, validation)
    if (manifest := finished(out, plan.hash, plan.is_earlier_build)) is not None:
        return manifest
    with build_lock(out, shared=share is not None), open_pool(workers) if pool is None else nullcontext(pool) as opened:
        if (manifest := finished(out, plan.hash)) is not None:  # another build has just finished
            return manifest
        work = begin(out, plan.hash, plan.content, files)
        try:
            results = _tokenize(plan, work, opened, share, allow_unusable, progress)
            return None if share is not None else _finish(plan, out, work, opened, results, allow_unusable, progress)
        except DataError:
            if share is None:  # other shares may be at work there
                delete_if_empty(out, work)
            raise


def _finish(
    plan: Plan,
    out: Path,
    work: Path,
    pool: Pool,
    results: Sequence[dict[str, Any]],
    allow_unusable: bool,
    progress: Progress,
) -> Manifest:
    """Selects the documents, packs and writes them. `results` are those of all tasks."""
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result["counts"])
    _judge(plan, results, counts, allow_unusable)
    selected = _select(plan, work, counts)
    files = encode_files([file.address for file in plan.files])
    bases = _earlier_records(plan.tasks, [result["records"] for result in results])
    writer = SplitWriter(out, work, plan.shape, plan.end_of_document, plan.options, pool, progress)
    manifest = Manifest(
        row_tokens=plan.shape.row_tokens,
        block_rows=plan.shape.block_rows,
        token_bytes=plan.shape.token_bytes,
        compression=plan.shape.compression,
        vocab_size=plan.vocab_size,
        end_of_document=plan.end_of_document,
        tokenizer=plan.tokenizer,
        splits={split: writer.write(split, selected.tokens[split], bases) for split in SPLITS},
        counts=dict(sorted(counts.items())),
        lengths=selected.lengths,
        options=plan.options.as_json(),
        plan=plan.hash,
        hashes={split: len(np.unique(hashed)) for split, hashed in selected.hashes.items()},
        validation_below=selected.validation_below,
        files_xxh3=xxhash.xxh3_64_hexdigest(files),
    )
    for split, hashed in selected.hashes.items():
        write_hashes(building_folder(out), split, hashed)
    finish(out, work, manifest, files)
    return manifest


def _select(plan: Plan, work: Path, counts: Counter[str]) -> Selected:
    options = plan.options
    return select_documents(
        work, len(plan.tasks), options.validation_share, options.deduplicate, counts, plan.first_validation_file
    )


def _judge(plan: Plan, results: Sequence[dict[str, Any]], counts: Counter[str], allow_unusable: bool) -> None:
    """Warns of text that was lost. DataError if a file has no usable document."""
    read = plan.options.read
    reports = merge_reports(chain.from_iterable(result["reports"] for result in results))
    for number, report in reports.items():
        report.check(plan.files[number], read, allow_unusable)
    if lost := long_documents(reports.values(), plan.files, read.max_document_bytes):
        log.warning("%s", lost)
    if counts.get(UNKNOWN):
        tokens = sum(result["tokens"] for result in results)
        log.warning(
            "%d of %d tokens are the unknown token: the tokenizer cannot represent this text, and it is lost; use a "
            "tokenizer with byte fallback",
            counts[UNKNOWN],
            tokens,
        )
    if counts.get(LOST):
        log.warning(
            "the tokenizer has no token for %d characters, and they are lost; use a tokenizer with byte fallback",
            counts[LOST],
        )


def _tokenize(
    plan: Plan,
    work: Path,
    pool: Pool,
    share: tuple[int, int] | None,
    allow_unusable: bool,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Runs the tasks that have no result yet. Returns the results of all tasks, or of those in the share."""
    options = TokenizeOptions(
        plan.options.read,
        plan.options.min_characters,
        plan.options.max_characters,
        plan.options.filters,
        plan.filters,
        allow_unusable,
    )
    folder = tokenizer_folder(work, plan.hash)
    numbers = range(len(plan.tasks)) if share is None else range(share[0], len(plan.tasks), share[1])
    results: dict[int, dict[str, Any]] = {n: r for n in numbers if (r := task_files(work, n).result()) is not None}
    pending = [number for number in numbers if number not in results]
    if pending:
        tasks = {number: plan.tasks[number] for number in pending}
        calls = [
            (run_task, (work, number, task, plan.files_of(task), folder, options, plan.shape.dtype.str))
            for number, task in tasks.items()
        ]
        sizes = [plan.task_bytes(task) for task in tasks.values()]
        total, unit = (sum(sizes), "bytes") if sum(sizes) else (len(tasks), "tasks")  # sizes may be unknown
        with progress("tokenizing", total, unit) as advance:
            for index, result in pool.run(calls):
                results[pending[index]] = result
                advance(sizes[index] if unit == "bytes" else 1)
    return [results[number] for number in numbers]


def _earlier_records(tasks: Sequence[Task], records: Sequence[Sequence[int]]) -> list[dict[int, int]]:
    """The number of records in earlier parts of each file, for each task. `records`: by task and part."""
    seen: Counter[int] = Counter()
    out = []
    for task, counts in zip(tasks, records, strict=True):
        out.append({part.file: seen[part.file] for part in task})
        for part, count in zip(task, counts, strict=True):
            seen[part.file] += count
    return out
