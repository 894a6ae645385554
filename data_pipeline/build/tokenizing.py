"""Tokenizes the documents of one task into a file of tokens, a table of documents, and counts.

The output depends on the input and the options alone. The JSON file is written last, so a task that was killed is
simply run again, on any machine.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.atomic_file import open_atomic, write_atomic
from data_pipeline.build import cleaning
from data_pipeline.build.part_report import PartReport
from data_pipeline.errors import DataError
from data_pipeline.sealed_result import read_result, write_result
from data_pipeline.sources.files import InputFile, check_unchanged
from data_pipeline.sources.readers import read_records
from data_pipeline.sources.records import BLANK, ReadOptions
from data_pipeline.sources.tasks import Task
from data_pipeline.tokenizers.loss import LossCounter
from data_pipeline.tokenizers.tokenizer import Tokenizer, load_tokenizer

DOCUMENT = np.dtype(
    [("hash_high", "<u8"), ("hash_low", "<u8"), ("file", "<u4"), ("document", "<u8"), ("length", "<u8")]
)
"""A kept document: hash of its text, input file, number in the file, tokens with the end-of-document token."""

BATCH_CHARACTERS = 1 << 20
REPAIRED = "repaired: not UTF-8"
UNKNOWN = "unknown tokens"
"""Count of the tokens that stand for text that the tokenizer cannot represent."""
LOST = "lost characters"
"""Count of the characters for which the tokenizer gives no token at all."""


@dataclass(frozen=True)
class TokenizeOptions:
    """How documents are read and filtered."""

    read: ReadOptions
    min_characters: int = 0
    max_characters: int | None = None
    filters: tuple[str, ...] = ()
    """Filters as `module:function`, see cleaning.py."""
    filter_sources: Mapping[str, str] = field(default_factory=dict)
    """Hash of each filter's source text when the build began, see `cleaning.filter_source`."""
    allow_unusable: bool = False
    """Whether a file may give no document at all."""


@dataclass(frozen=True)
class TaskFiles:
    """The paths of a task's output."""

    tokens: Path
    documents: Path
    """Table of DOCUMENT."""
    done: Path
    """The task's counts (`sealed_result.py`); it exists once the task is finished."""

    def result(self) -> dict[str, Any] | None:
        """What `run_task` returned; None if the task is not finished, or if its files were changed since."""
        return read_result(self.done, (self.tokens, self.documents))


def task_files(work: Path, number: int) -> TaskFiles:
    """The paths of the output of task `number`."""
    name = f"task-{number:06d}"
    return TaskFiles(work / f"{name}.tokens", work / f"{name}.documents", work / f"{name}.json")


def run_task(
    work: Path,
    number: int,
    task: Task,
    files: Mapping[int, InputFile],
    tokenizer_folder: Path,
    options: TokenizeOptions,
    token_dtype: str,
) -> dict:
    """Tokenizes the task's documents, unless that was done before.

    Returns "counts" by reason, "records" and "reports" (PartReport) of each part, and "tokens". DataError if a file
    cannot be read or changed since the build began."""
    out = task_files(work, number)
    if (done := out.result()) is not None:
        return done
    tokenizer, loss = _tokenizer(str(tokenizer_folder))
    counts: Counter[str] = Counter()
    reports = [PartReport(part.file) for part in task]
    kept = _kept_documents(task, files, options, counts, reports)
    tables = []
    with open_atomic(out.tokens) as opened:
        for batch in _batches(kept):
            tokens, table = _encode(batch, tokenizer, token_dtype, counts)
            if lost := loss.count([text for text, _, _ in batch]):
                counts[LOST] += lost
            opened.write(tokens.tobytes())
            tables.append(table)
        for file in files.values():
            check_unchanged(file)
    documents = np.concatenate(tables) if tables else np.empty(0, DOCUMENT)
    write_atomic(out.documents, documents.tobytes())
    result = {
        "counts": dict(sorted(counts.items())),
        "records": [report.records for report in reports],
        "reports": [report.as_json() for report in reports],
        "tokens": int(documents["length"].sum()),
    }
    write_result(out.done, result, (out.tokens, out.documents))
    return result


@lru_cache(maxsize=1)
def _tokenizer(folder: str) -> tuple[Tokenizer, LossCounter]:
    tokenizer = load_tokenizer(folder)
    return tokenizer, LossCounter(tokenizer)


Kept = tuple[str, int, int]
"""A document's text, the number of its file, and its number in the part."""


def _kept_documents(
    task: Task,
    files: Mapping[int, InputFile],
    options: TokenizeOptions,
    counts: Counter[str],
    reports: Sequence[PartReport],
) -> Iterator[Kept]:
    """Documents that pass all filters. Fills `counts`, and the report of each part."""
    filters = make_filters(options)
    for part, report in zip(task, reports, strict=True):
        for record in read_records(files[part.file], part, options.read, report.keys):
            report.add(record)
            if record.problem == BLANK:
                continue
            counts["documents read"] += 1
            if record.repaired:
                counts[REPAIRED] += 1
            reason = record.problem
            if record.text is not None:
                counts["bytes read"] += len(record.text) if record.text.isascii() else len(record.text.encode())
                reason = next((why for check in filters if (why := check(record.text))), None)
                if reason is None:
                    yield record.text, part.file, report.records - 1
                    continue
            counts[f"dropped: {reason}"] += 1
        if part.is_whole_file:
            report.check(files[part.file], options.read, options.allow_unusable)


def make_filters(options: TokenizeOptions) -> list[cleaning.Filter]:
    """The filters that the options name, in the order in which they run. DataError if one does not exist, or was
    edited since the build began."""
    for name, source in options.filter_sources.items():
        if cleaning.filter_source(name) != source:
            raise DataError(
                f"--filter {name} was edited while the build was running; delete the build's .work folder and build "
                f"again"
            )
    filters: list[cleaning.Filter] = [cleaning.empty]
    if options.min_characters:
        filters.append(cleaning.shorter_than(options.min_characters))
    if options.max_characters is not None:
        filters.append(cleaning.longer_than(options.max_characters))
    return filters + [cleaning.load_filter(name) for name in options.filters]


def _batches(documents: Iterable[Kept]) -> Iterator[list[Kept]]:
    """The documents in batches of about BATCH_CHARACTERS."""
    batch: list[Kept] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[0])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(
    batch: list[Kept], tokenizer: Tokenizer, token_dtype: str, counts: Counter[str]
) -> tuple[NDArray, NDArray[np.void]]:
    """The batch's tokens, each document between its control tokens, and its table (DOCUMENT). Counts unknown tokens."""
    end, begin = tokenizer.end_of_document, tokenizer.beginning_of_document
    before = () if begin is None else (begin,)
    ids = tokenizer.encode_batch([text for text, _, _ in batch])
    lengths = np.array([len(before) + len(tokens) + 1 for tokens in ids], np.int64)
    tokens_of = itertools.chain.from_iterable((*before, *tokens, end) for tokens in ids)
    flat = np.fromiter(tokens_of, token_dtype, int(lengths.sum()))
    if tokenizer.unknown is not None and (unknown := int(np.count_nonzero(flat == tokenizer.unknown))):
        counts[UNKNOWN] += unknown
    if np.count_nonzero(flat == end) != len(batch):
        raise DataError(
            f"the tokenizer gave the end-of-document id {end} for text inside a document; "
            f"name a control token that text cannot spell with --end-of-document"
        )
    table = np.empty(len(batch), DOCUMENT)
    hashes = [cleaning.content_hash(text) for text, _, _ in batch]
    table["hash_high"], table["hash_low"] = np.array(hashes, np.uint64).T
    table["file"] = [file for _, file, _ in batch]
    table["document"] = [number for _, _, number in batch]
    table["length"] = lengths
    return flat, table


def load_documents(work: Path, number: int) -> NDArray[np.void]:
    """The table (DOCUMENT) of a finished task."""
    return np.fromfile(task_files(work, number).documents, DOCUMENT)
