"""Builds a data set anew for another row length, out of its shards: nothing is tokenized again.

The documents of each group are put together from their pieces, in the order in which they were read; from there it is
the same as a build, and so is the output.
"""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_pipeline.build.folder import begin, finish, finished
from data_pipeline.build.prepare import BuildOptions, Report, write_splits
from data_pipeline.build.selection import IN_TRAIN, IN_VALIDATION, Selected, choice_file
from data_pipeline.build.tokenizing import DOCUMENT, task_files
from data_pipeline.build.workers import Pool
from data_pipeline.errors import DataError
from data_pipeline.shards.cache import BlockCache
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import TRAIN, VALIDATION, Manifest
from data_pipeline.shards.rows_reader import RowReader
from data_pipeline.shards.shard_file import PIECE, ShardShape
from data_pipeline.whole_file import write_whole

Group = tuple[str, int, int]  # split, first row, row after the last


def repack_dataset(
    address: str, out: Path, options: BuildOptions, pool: Pool, report: Report = lambda progress: None
) -> Manifest:
    """Rows of `options.seq_len` tokens; of the options only those of packing and storage count."""
    dataset = DataSet(address)
    old = dataset.manifest
    options = replace(options, **{name: old.options[name] for name in ("group_tokens", "shard_bytes", "block_bytes")})
    content = {"data set": old.fingerprint, "options": options.as_json()}
    plan_hash = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
    if (done := finished(out, plan_hash)) is not None:
        return done
    folder = dataset.tokenizer_dir()
    tokenizer = {name: (folder / name).read_bytes() for name in old.tokenizer}
    files = dataset.files()
    dataset.close()
    work = begin(out, plan_hash, content, tokenizer)
    groups = [group for split in (TRAIN, VALIDATION) for group in _groups(old, split)]
    tokens = dict(pool.run([(unpack_group, (address, work, n, group)) for n, group in enumerate(groups)]))
    by_split = [
        [tokens[n] if group[0] == split else 0 for n, group in enumerate(groups)] for split in (TRAIN, VALIDATION)
    ]
    documents = sum(split.documents for split in old.splits.values())
    selected = Selected(by_split[0], by_split[1], documents, old.lengths)
    shape = ShardShape(0, options.seq_len, options.block_rows(old.token_bytes), old.token_bytes, options.compression)
    bases: list[dict[int, int]] = [{} for _ in groups]
    splits = write_splits(out, work, pool, selected, bases, shape, old.end_of_document, options, report)
    manifest = replace(
        old,
        row_tokens=shape.row_tokens,
        block_rows=shape.block_rows,
        compression=shape.compression,
        splits=splits,
        options={**old.options, **_packing_options(options)},
        plan=plan_hash,
    )
    finish(out, work, manifest, files)
    return manifest


def _packing_options(options: BuildOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("seq_len", "packing", "compression")}


def _groups(manifest: Manifest, split: str) -> list[Group]:
    bounds = [*manifest.splits[split].groups, manifest.splits[split].rows]
    return [(split, first, last) for first, last in pairwise(bounds) if last > first]


def unpack_group(address: str, work: Path, number: int, group: Group) -> int:
    """The group's documents as the output of a task. Returns their tokens."""
    out = task_files(work, number)
    if (done := out.result()) is not None:
        return done["tokens"]
    split, first, last = group
    reader = RowReader(DataSet(address), split, 0, BlockCache(1 << 30))
    rows = np.arange(first, last, dtype=np.int64)
    zeros = np.zeros(len(rows), np.int64)
    tokens, used = reader.cut_rows(rows, 1, zeros, zeros)
    counts, pieces = _pieces(reader, first, last)
    row = np.repeat(np.arange(len(rows)), counts)
    start = pieces["start"].astype(np.int64)
    is_last = np.append(row[1:] != row[:-1], True)
    length = np.where(is_last, used[row], np.append(start[1:], 0)) - start
    order = np.lexsort((pieces["offset"], pieces["document"], pieces["file"]))
    places = zip(row[order].tolist(), start[order].tolist(), length[order].tolist(), strict=True)
    flat = np.concatenate([tokens[r, s : s + n] for r, s, n in places])
    documents = _documents(pieces[order], length[order])
    if not int(documents["length"].sum()) == len(flat) == int(used.sum()):
        raise DataError(f"{address}: rows {first} to {last - 1} do not make up whole documents; build it again")
    write_whole(out.tokens, flat.tobytes())
    write_whole(out.documents, documents.tobytes())
    choice = IN_TRAIN if split == TRAIN else IN_VALIDATION
    write_whole(choice_file(work, number), np.full(len(documents), choice, np.uint8).tobytes())
    write_whole(out.done, json.dumps({"counts": Counter(), "records": [], "tokens": len(flat)}).encode())
    return len(flat)


def _pieces(reader: RowReader, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.void]]:
    """Pieces of each row, and all pieces in order. Groups need not begin with a block."""
    block_rows = reader.shape.block_rows
    counts, pieces = [], []
    for block in range(first // block_rows, -(-last // block_rows)):
        starts, of_block = reader.origins(block)
        begin = max(first - block * block_rows, 0)
        end = min(last - block * block_rows, len(starts) - 1)
        counts.append(np.diff(starts[begin : end + 1].astype(np.int64)))
        pieces.append(of_block[starts[begin] : starts[end]])
    return np.concatenate(counts), np.concatenate(pieces).astype(PIECE)


def _documents(pieces: NDArray[np.void], lengths: NDArray[np.int64]) -> NDArray[np.void]:
    """One entry for each document; its pieces stand together, in order."""
    begins = np.flatnonzero(pieces["offset"] == 0)
    out = np.zeros(len(begins), DOCUMENT)
    out["file"], out["document"] = pieces["file"][begins], pieces["document"][begins]
    out["length"] = np.add.reduceat(lengths, begins)
    return out
