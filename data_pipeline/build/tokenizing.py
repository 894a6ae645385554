"""First stage of preparation: a task's documents become one file of tokens, one table of documents, and counts.

A task is a function of its input and the options alone, and its JSON file appears last, so it can be killed at any
point and done again by anybody.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.build import cleaning
from data_pipeline.errors import DataError
from data_pipeline.sources.files import InputFile, Task
from data_pipeline.sources.readers import read_records
from data_pipeline.sources.records import BLANK, ReadOptions
from data_pipeline.tokenizers.tokenizer import Tokenizer, load_tokenizer
from data_pipeline.whole_file import open_whole, write_whole

DOCUMENT = np.dtype(
    [("hash_high", "<u8"), ("hash_low", "<u8"), ("file", "<u4"), ("document", "<u8"), ("length", "<u8")]
)
"""A kept document: hash of its text, input file, number in the file, tokens with the end-of-document token."""

BATCH_CHARACTERS = 1 << 20
MENDED = "mended: not UTF-8"


@dataclass(frozen=True)
class TokenizeOptions:
    read: ReadOptions
    min_characters: int = 0
    max_characters: int | None = None
    filters: tuple[str, ...] = ()
    """`module:function`, see cleaning.py."""


@dataclass(frozen=True)
class TaskFiles:
    """Where a task's output is."""

    tokens: Path
    documents: Path
    done: Path

    def result(self) -> dict | None:
        try:
            return json.loads(self.done.read_text())
        except FileNotFoundError:
            return None


def task_files(work: Path, number: int) -> TaskFiles:
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
    """Do it, unless it is done. Returns its counts."""
    out = task_files(work, number)
    if (done := out.result()) is not None:
        return done
    tokenizer = _tokenizer(str(tokenizer_folder))
    counts: Counter[str] = Counter()
    records: list[int] = []
    kept = _kept_documents(task, files, options, counts, records)
    tables = []
    with open_whole(out.tokens) as opened:
        for batch in _batches(kept):
            tokens, table = _encode(batch, tokenizer, token_dtype)
            opened.write(tokens.tobytes())
            tables.append(table)
    documents = np.concatenate(tables) if tables else np.empty(0, DOCUMENT)
    write_whole(out.documents, documents.tobytes())
    result = {"counts": dict(sorted(counts.items())), "records": records, "tokens": int(documents["length"].sum())}
    write_whole(out.done, json.dumps(result).encode())
    return result


@lru_cache(maxsize=1)
def _tokenizer(folder: str) -> Tokenizer:
    return load_tokenizer(folder)


Kept = tuple[str, int, int]  # text, file, number in the part


def _kept_documents(
    task: Task, files: Mapping[int, InputFile], options: TokenizeOptions, counts: Counter[str], records: list[int]
) -> Iterator[Kept]:
    """Documents that pass all filters. Fills `counts`, and `records` with the number of records of each part."""
    filters = make_filters(options)
    for part in task:
        seen = 0
        for record in read_records(files[part.file], part, options.read):
            seen += 1
            if record.problem == BLANK:
                continue
            counts["documents read"] += 1
            if record.mended:
                counts[MENDED] += 1
            reason = record.problem
            if record.text is not None:
                counts["bytes read"] += len(record.text) if record.text.isascii() else len(record.text.encode())
                reason = next((why for keep in filters if (why := keep(record.text))), None)
                if reason is None:
                    yield record.text, part.file, seen - 1
                    continue
            counts[f"dropped: {reason}"] += 1
        records.append(seen)


def make_filters(options: TokenizeOptions) -> list[cleaning.Filter]:
    filters: list[cleaning.Filter] = [cleaning.empty]
    if options.min_characters:
        filters.append(cleaning.shorter_than(options.min_characters))
    if options.max_characters is not None:
        filters.append(cleaning.longer_than(options.max_characters))
    return filters + [cleaning.load_filter(name) for name in options.filters]


def _batches(documents: Iterable[Kept]) -> Iterator[list[Kept]]:
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


def _encode(batch: list[Kept], tokenizer: Tokenizer, token_dtype: str) -> tuple[NDArray, NDArray[np.void]]:
    """The batch's tokens, each document followed by the end-of-document token, and its table."""
    end = tokenizer.end_of_document
    ids = tokenizer.encode_batch([text for text, _, _ in batch])
    lengths = np.array([len(tokens) + 1 for tokens in ids], np.int64)
    flat = np.fromiter(itertools.chain.from_iterable((*tokens, end) for tokens in ids), token_dtype, int(lengths.sum()))
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
    return np.fromfile(task_files(work, number).documents, DOCUMENT)
