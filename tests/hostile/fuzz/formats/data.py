"""Prepared data sets: the manifest, the addresses of the inputs, shards, hashes and the tokenizer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tests.hostile.fuzz.format import Codec, Consumer, Format, RefusedError, command
from tests.hostile.fuzz.formats.shard_codec import (
    MANIFEST,
    blocks,
    header_tree,
    index_tree,
    signed,
    with_blocks,
    with_files,
    with_header,
    with_index,
    with_tokenizer,
)
from tests.hostile.fuzz.json_text import dumps

SHARD = "set/shards/train-00000.shard"


def build_set(folder: Path, **options: Any) -> None:
    """A data set of 40 documents in `set`, of two shards."""
    from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
    from tests.data_pipeline.sets import build, documents

    train_sentencepiece(documents(200), folder / "tokenizer", vocab_size=320)
    chosen = {"shard_bytes": 4_000, "validation_share": 0.1, **options}
    build(folder / "set", documents(60), folder / "tokenizer", **chosen)


def rows(folder: Path, out: Path) -> str:
    """Every row of every split, and where each comes from."""
    from data_pipeline.shards.cache import BlockCache
    from data_pipeline.shards.dataset import DataSet
    from data_pipeline.shards.rows_reader import RowReader

    dataset, text = DataSet(str(folder / "set")), ""
    for number, split in enumerate(sorted(dataset.manifest.splits)):
        reader = RowReader(dataset, split, number, BlockCache(1 << 20))
        numbers = np.arange(reader.rows)
        tokens = reader.gather(numbers, 0 * numbers, 0 * numbers)
        digests = [xxhash.xxh3_64_hexdigest(tokens.tobytes())]
        for block in range(reader.blocks):
            starts, pieces = reader.origins(block)
            digests.append(xxhash.xxh3_64_hexdigest(starts.tobytes() + pieces.tobytes()))
        text += f"{split} {tokens.shape} {digests} "
    return text


def batches(folder: Path, out: Path) -> str:
    """The first batches of a stream, and the validation batches."""
    from data_pipeline.stream.stream import Stream
    from tests.data_pipeline.sets import config

    with Stream(config(folder / "set"), seq_len=32) as stream:
        stream.check_tokenizers()
        steps = stream.steps(first_step=0, **STEPS)
        read = [batch for _, step in zip(range(5), steps, strict=False) for batch in step]
        read += stream.validation(sequences=4, micro_batch_size=2, rank=0, world_size=1)
        digests = [xxhash.xxh3_64_hexdigest(batch.tokens_BT.tobytes() + batch.labels_BT.tobytes()) for batch in read]
        return f"{digests} {stream.end_of_document}"


def token_ids(folder: Path, out: Path) -> str:
    """The ids of a text by the data set's tokenizer."""
    from data_pipeline.shards.dataset import DataSet

    dataset = DataSet(str(folder / "set"))
    tokenizer = dataset.tokenizer()
    ids = tokenizer.encode("the cat sat on a mat 123 é")
    return f"{ids} {tokenizer.decode(ids)} {tokenizer.vocab_size} {tokenizer.end_of_document}"


def addresses(folder: Path, out: Path) -> str:
    """The addresses of the input files."""
    from data_pipeline.shards.dataset import DataSet

    return repr([Path(file).name for file in DataSet(str(folder / "set")).files()])


def shown(folder: Path, out: Path) -> str:
    """Whether `keepstep data show` shows the data set, for people and as JSON."""
    command("data", "show", str(folder / "set"))
    command("data", "show", str(folder / "set"), "--json")
    return "shown"


def build_with_state(folder: Path) -> None:
    """A data set, and the state of a stream after five steps."""
    from data_pipeline.stream.stream import Stream
    from tests.data_pipeline.sets import config

    build_set(folder)
    with Stream(config(folder / "set"), seq_len=32) as stream:
        steps = stream.steps(first_step=0, **STEPS)
        for _ in range(5):
            next(steps)
        (folder / "state.json").write_text(json.dumps(stream.state(5)))


def resumed(folder: Path, out: Path) -> str:
    """The samples of the steps after a resume."""
    from data_pipeline.stream.stream import Stream
    from data_pipeline.untrusted import parse_json
    from tests.data_pipeline.sets import config

    with Stream(config(folder / "set"), seq_len=32) as stream:
        stream.restore([parse_json((folder / "state.json").read_bytes())])
        steps = stream.steps(first_step=5, **STEPS)
        read = [batch for _, step in zip(range(2), steps, strict=False) for batch in step]
        return f"{[xxhash.xxh3_64_hexdigest(batch.tokens_BT.tobytes()) for batch in read]}"


def build_two(folder: Path) -> None:
    """Two data sets of different documents, whose validation splits have other shares."""
    from tests.data_pipeline.sets import build, documents

    build_set(folder)
    build(folder / "other", documents(60, seed=9), folder / "tokenizer", validation_share=0.3)


def overlap(folder: Path, out: Path) -> str:
    """The comparison of the documents of two data sets."""
    from data_pipeline.shards.dataset import DataSet
    from data_pipeline.stream.overlap import check_splits

    check_splits([DataSet(str(folder / name)) for name in ("set", "other")])
    return "no document is in both"


JSON_SIGNED = Codec(json.loads, signed)
PLAIN = Codec(json.loads, lambda files, name, tree: {name: dumps(tree)}, is_signed=False)
STEPS: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 4, "rank": 0, "world_size": 1}
READ = [
    Consumer("rows", rows),
    Consumer("batches", batches),
    Consumer("token_ids", token_ids),
    Consumer("addresses", addresses),
    Consumer("show", shown, errors=(RefusedError,)),
]

FORMATS = [
    Format(
        "data-manifest",
        build_set,
        [(MANIFEST, JSON_SIGNED), (MANIFEST, JSON_SIGNED), (MANIFEST, PLAIN)],
        READ,
        "counts, lengths, options and plan describe the build; a larger vocabulary means padding",
    ),
    Format(
        "data-files",
        build_set,
        [("set/files.json", PLAIN), ("set/files.json", Codec(json.loads, with_files))],
        [Consumer("addresses", addresses, exact=False), *READ[:3]],
        "the addresses, if all checksums are computed again: they are names for people",
    ),
    Format(
        "data-hashes",
        build_two,
        [("set/hashes/train.u64", None), ("other/hashes/validation.u64", None)],
        [Consumer("overlap", overlap), Consumer("rows", rows)],
        "the hashes, which have no checksum: damage can hide a document that two sources share, and nothing else",
    ),
    Format(
        "data-shard",
        build_set,
        [(SHARD, Codec(header_tree, with_header)), (SHARD, Codec(index_tree, with_index)), (SHARD, None)],
        READ,
        "nothing",
    ),
    Format(
        "data-shard-zstd",
        lambda folder: build_set(folder, compression="zstd"),
        [(SHARD, Codec(index_tree, with_index)), (SHARD, None)],
        READ,
        "nothing",
    ),
    Format(
        "data-state",
        build_with_state,
        [("state.json", PLAIN)],
        [Consumer("resume", resumed, exact=False, errors=(ValueError, OSError))],
        "samples, if the checkpoint's checksum is computed again; one in a checkpoint is parsed before",
        special=False,
    ),
    Format(
        "data-blocks",
        lambda folder: build_set(folder, compression="zstd"),
        [(SHARD, Codec(blocks, with_blocks))],
        [replace(consumer, exact=False) for consumer in READ],
        "the rows: whoever can compute all checksums can make a data set of other rows",
    ),
    Format(
        "data-tokenizer",
        build_set,
        [("set/tokenizer/tokenizer.model", Codec(bytes, with_tokenizer)), ("set/tokenizer/tokenizer.model", None)],
        [replace(consumer, exact=False) for consumer in READ],
        "the tokenizer: whoever can compute all checksums can make a data set with another tokenizer",
    ),
]
