"""Repacks a data set into rows of another length, from its shards; nothing is tokenized again.

The documents of each group are reassembled from their pieces, in the order in which they were read. From there, the
work and the output are those of a build.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_pipeline.atomic_file import write_atomic
from data_pipeline.build.folder import begin, building_folder, finish, finished
from data_pipeline.build.lock import build_lock
from data_pipeline.build.options import BuildOptions
from data_pipeline.build.plan import plan_hash
from data_pipeline.build.selection import CHOICE_OF_SPLIT, choice_file
from data_pipeline.build.splits import SplitWriter
from data_pipeline.build.tokenizing import DOCUMENT, task_files
from data_pipeline.build.workers import Pool
from data_pipeline.errors import DataError
from data_pipeline.progress import Progress, silent
from data_pipeline.sealed_result import read_result, write_result
from data_pipeline.shards.cache import BlockCache
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.document_hashes import read_hashes, write_hashes
from data_pipeline.shards.manifest import SPLITS, Manifest
from data_pipeline.shards.manifest_file import encode_files
from data_pipeline.shards.rows_reader import RowReader
from data_pipeline.shards.shard_file import PIECE, ShardShape


class _GroupRows(NamedTuple):
    """The rows of a group: the documents that were packed together."""

    split: str
    first: int
    end: int
    """The row after the last."""


def repack_dataset(address: str, out: Path, options: BuildOptions, pool: Pool, progress: Progress = silent) -> Manifest:
    """Builds `out` with rows of `options.seq_len` tokens and returns its manifest.

    Of the options only `seq_len`, `packing` and `compression` are used. DataError if the data set is damaged."""
    dataset = DataSet(address)
    old = dataset.manifest
    options = replace(options, **_kept_options(old, address))
    content = {"data set": old.fingerprint, "options": options.as_json()}
    plan = plan_hash(content)
    if (manifest := finished(out, plan)) is not None:
        return manifest
    with build_lock(out):
        return _repack(dataset, out, options, plan, content, pool, progress)


def _kept_options(manifest: Manifest, address: str) -> dict[str, int]:
    """The options of the first build that the repacked data set keeps. DataError if they are not sizes."""
    kept: dict[str, int] = {}
    for name in ("group_tokens", "shard_bytes", "block_bytes"):
        value = manifest.options.get(name)
        if not isinstance(value, int) or not 0 < value < 1 << 60:
            raise DataError(f"{address} was built with {name} {value!r}, which is no size; build the data set again")
        kept[name] = value
    return kept


def _repack(
    dataset: DataSet,
    out: Path,
    options: BuildOptions,
    plan: str,
    content: dict[str, Any],
    pool: Pool,
    progress: Progress,
) -> Manifest:
    if (manifest := finished(out, plan)) is not None:  # another build has just finished
        return manifest
    old, address = dataset.manifest, dataset.address
    tokenizer = dataset.tokenizer_files()
    files = encode_files(dataset.files())
    work = begin(out, plan, content, tokenizer)
    groups = [group for split in SPLITS for group in _groups(old, split)]
    tokens = _unpack(address, work, groups, old, pool, progress)
    by_split = {
        split: [count if group.split == split else 0 for group, count in zip(groups, tokens, strict=True)]
        for split in SPLITS
    }
    shape = ShardShape(0, options.seq_len, options.block_rows(old.token_bytes), old.token_bytes, options.compression)
    writer = SplitWriter(out, work, shape, old.end_of_document, options, pool, progress)
    bases: list[dict[int, int]] = [{} for _ in groups]
    manifest = replace(
        old,
        row_tokens=shape.row_tokens,
        block_rows=shape.block_rows,
        compression=shape.compression,
        splits={split: writer.write(split, by_split[split], bases) for split in SPLITS},
        options=old.options | {name: getattr(options, name) for name in ("seq_len", "packing", "compression")},
        plan=plan,
        files_xxh3=xxhash.xxh3_64_hexdigest(files),
    )
    for split in old.hashes:
        write_hashes(building_folder(out), split, read_hashes(dataset, split, 2**64))
    dataset.close()
    finish(out, work, manifest, files)
    return manifest


def _groups(manifest: Manifest, split: str) -> list[_GroupRows]:
    bounds = [*manifest.splits[split].groups, manifest.splits[split].rows]
    return [_GroupRows(split, first, end) for first, end in pairwise(bounds) if end > first]


def _unpack(
    address: str, work: Path, groups: list[_GroupRows], manifest: Manifest, pool: Pool, progress: Progress
) -> list[int]:
    """Unpacks all groups. Returns the tokens of each."""
    calls = [(unpack_group, (address, work, number, group)) for number, group in enumerate(groups)]
    tokens = [0] * len(groups)
    with progress("unpacking", sum(split.tokens for split in manifest.splits.values()), "tokens") as advance:
        for number, count in pool.run(calls):
            tokens[number] = count
            advance(count)
    return tokens


def unpack_group(address: str, work: Path, number: int, group: _GroupRows) -> int:
    """Writes the group's documents like the output of task `number`. Returns the number of their tokens.

    DataError if the rows do not make up whole documents."""
    out = task_files(work, number)
    written = (out.tokens, out.documents, choice_file(work, number))
    if (done := read_result(out.done, written)) is not None:
        return done["tokens"]
    reader = RowReader(DataSet(address), group.split, 0, BlockCache(1 << 30))
    rows = np.arange(group.first, group.end, dtype=np.int64)
    zeros = np.zeros(len(rows), np.int64)
    tokens, used = reader.cut_rows(rows, 1, zeros, zeros)
    counts, pieces = _pieces(reader, group)
    if not len(pieces) or int(counts.min()) < 1:
        raise _not_whole(address, group)
    row = np.repeat(np.arange(len(rows)), counts)
    start = pieces["start"].astype(np.int64)
    is_last = np.append(row[1:] != row[:-1], True)
    length = np.where(is_last, used[row], np.append(start[1:], 0)) - start
    order = np.lexsort((pieces["offset"], pieces["document"], pieces["file"]))
    copies = zip(row[order].tolist(), start[order].tolist(), length[order].tolist(), strict=True)
    flat = np.concatenate([tokens[r, s : s + n] for r, s, n in copies])
    documents = _documents(pieces[order], length[order])
    if not int(documents["length"].sum()) == len(flat) == int(used.sum()):
        raise _not_whole(address, group)
    write_atomic(out.tokens, flat.tobytes())
    write_atomic(out.documents, documents.tobytes())
    write_atomic(choice_file(work, number), np.full(len(documents), CHOICE_OF_SPLIT[group.split], np.uint8).tobytes())
    write_result(out.done, {"counts": {}, "records": [], "tokens": len(flat)}, written)
    return len(flat)


def _not_whole(address: str, group: _GroupRows) -> DataError:
    return DataError(
        f"{address}: {group.split} rows {group.first} to {group.end - 1} do not make up whole documents; build the "
        f"data set again"
    )


def _pieces(reader: RowReader, group: _GroupRows) -> tuple[NDArray[np.int64], NDArray[np.void]]:
    """The number of pieces of each row, and all pieces (PIECE) in order. Groups need not begin with a block."""
    block_rows = reader.shape.block_rows
    counts, pieces = [], []
    for block in range(group.first // block_rows, -(-group.end // block_rows)):
        starts, of_block = reader.origins(block)
        begin = max(group.first - block * block_rows, 0)
        end = min(group.end - block * block_rows, len(starts) - 1)
        counts.append(np.diff(starts[begin : end + 1].astype(np.int64)))
        pieces.append(of_block[starts[begin] : starts[end]])
    return np.concatenate(counts), np.concatenate(pieces).astype(PIECE)


def _documents(pieces: NDArray[np.void], lengths: NDArray[np.int64]) -> NDArray[np.void]:
    """The table (DOCUMENT) of the documents. All pieces of a document are neighbours, in order."""
    begins = np.flatnonzero(pieces["offset"] == 0)
    out = np.zeros(len(begins), DOCUMENT)
    out["file"], out["document"] = pieces["file"][begins], pieces["document"][begins]
    out["length"] = np.add.reduceat(lengths, begins)
    return out
