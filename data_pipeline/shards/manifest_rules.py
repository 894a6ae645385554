"""Rules that a manifest keeps, whoever wrote it: names that are safe, sizes that are possible, counts that agree."""

import re
from collections.abc import Iterator
from itertools import pairwise

from data_pipeline.shards.manifest import EARLIER_VALIDATION, SPLITS, Manifest, Shard, Split
from data_pipeline.shards.shard_file import HEADER_BYTES
from data_pipeline.tokenizers.tokenizer import TOKENIZER_FILES

MAX_BLOCK_BYTES = 1 << 30
"""Bytes of a block's rows, at most."""
MAX_BLOCKS = 1 << 28
"""Blocks of a split, at most."""
_SHARD = re.compile(rf"shards/({'|'.join(SPLITS)}|{EARLIER_VALIDATION})-\d{{5,9}}\.shard")
_HASH = re.compile(r"[0-9a-f]{32}")
_SHOWN = 200


def problem_of(manifest: Manifest) -> str | None:
    """What is wrong with a manifest whose members have the right types, or None."""
    return next(_problems(manifest), None)


def _problems(manifest: Manifest) -> Iterator[str]:
    yield from _name_problems(manifest)
    if problem := _shape_problem(manifest):
        yield problem
        return
    for name, split in manifest.splits.items():
        yield from (f"the split {name} {problem}" for problem in _split_problems(manifest, split))
    documents = sum(split.documents for split in manifest.splits.values())
    if sum(manifest.lengths.values()) != documents:
        yield f"lengths has {sum(manifest.lengths.values())} documents, but the splits have {documents}"
    kept = manifest.counts.get("documents read", 0) - sum(
        count for name, count in manifest.counts.items() if name.startswith("dropped: ")
    )
    if kept != documents:
        yield f"counts has {kept} documents that were read and not dropped, but the splits have {documents}"
    for name, number in manifest.hashes.items():
        if number > manifest.splits[name].documents:
            yield f"hashes has {number} documents of {name}, which has {manifest.splits[name].documents}"


def _name_problems(manifest: Manifest) -> Iterator[str]:
    """Names become paths, so only those that a build gives are accepted."""
    if set(manifest.splits) != set(SPLITS):
        yield f"the splits are {_shown(sorted(manifest.splits))}, not {' and '.join(SPLITS)}"
    for name, checksum in manifest.tokenizer.items():
        if name not in TOKENIZER_FILES:
            yield f"tokenizer names {_shown(name)}; a tokenizer has the files {', '.join(TOKENIZER_FILES)}"
        if not _HASH.fullmatch(checksum):
            yield f"tokenizer has {_shown(checksum)} in place of a checksum"
    if not set(manifest.hashes) <= set(SPLITS):
        yield f"hashes names {_shown(sorted(manifest.hashes))}; it may name {' and '.join(SPLITS)}"
    names = [shard.file for split in manifest.splits.values() for shard in split.shards]
    for name in names:
        if not _SHARD.fullmatch(name):
            yield f"a shard has the name {_shown(name)}; names are shards/SPLIT-NNNNN.shard"
    for name in (*manifest.counts, *manifest.lengths, *manifest.options):
        if not name.isprintable() or len(name) > _SHOWN:
            yield f"it has the name {_shown(name)}"
    if not all(length.isdecimal() and length.isascii() for length in manifest.lengths):
        yield "lengths has a name that is not a number"


def _shape_problem(manifest: Manifest) -> str | None:
    if manifest.token_bytes not in (2, 4):
        return f"token_bytes is {manifest.token_bytes}, not 2 or 4"
    if not manifest.row_tokens or not manifest.block_rows:
        return f"row_tokens is {manifest.row_tokens} and block_rows is {manifest.block_rows}; both are at least 1"
    if not manifest.end_of_document < manifest.vocab_size <= 1 << (8 * manifest.token_bytes):
        return (
            f"end_of_document is {manifest.end_of_document}, vocab_size {manifest.vocab_size} and token_bytes "
            f"{manifest.token_bytes}; each must fit into the next"
        )
    largest = max((shard.rows for split in manifest.splits.values() for shard in split.shards), default=0)
    shape = manifest.shape(largest)
    block_bytes = min(shape.block_rows, largest) * shape.row_items * shape.token_bytes
    if block_bytes > MAX_BLOCK_BYTES:
        return f"a block has {block_bytes:,} bytes, more than {MAX_BLOCK_BYTES:,}"
    return None


def _split_problems(manifest: Manifest, split: Split) -> Iterator[str]:
    if (rows := sum(shard.rows for shard in split.shards)) != split.rows:
        yield f"has {split.rows} rows, but its shards have {rows}"
    if manifest.shape(split.rows).blocks > MAX_BLOCKS:
        yield f"has {manifest.shape(split.rows).blocks:,} blocks, more than {MAX_BLOCKS:,}"
    if split.tokens + split.padding != split.rows * manifest.row_tokens:
        yield (
            f"has {split.tokens} tokens and {split.padding} of padding, but {split.rows} rows of "
            f"{manifest.row_tokens} tokens"
        )
    if not split.documents_cut <= split.documents <= split.tokens:
        yield f"has {split.documents_cut} cut documents, {split.documents} documents and {split.tokens} tokens"
    groups = (*split.groups, split.rows)
    if groups[0] != 0 or any(first > second for first, second in pairwise(groups)):
        yield f"has groups that do not begin at row 0, or that are not in order up to its {split.rows} rows"
    for shard, follower in pairwise((*split.shards, None)):
        assert shard is not None
        yield from (f"has the shard {shard.file}, which {p}" for p in _shard_problems(manifest, split, shard, follower))


def _shard_problems(manifest: Manifest, split: Split, shard: Shard, follower: Shard | None) -> Iterator[str]:
    first, shape = split.shards[0].rows, manifest.shape(shard.rows)
    if not 0 < shard.rows <= first or (follower is not None and shard.rows != first):
        yield f"has {shard.rows} rows; all but the last have the {first} of the first"
    if follower is not None and shard.rows % manifest.block_rows:
        yield f"has {shard.rows} rows, which are no whole blocks of {manifest.block_rows}"
    if not shard.xxh3:
        yield "has no checksum"
    data_bytes = shard.rows * shape.row_items * shape.token_bytes if manifest.compression == "none" else 0
    least = HEADER_BYTES + data_bytes + shape.index_bytes
    if shard.bytes < least:
        yield f"has {shard.bytes} bytes, fewer than the {least} of its rows and index"


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN]
