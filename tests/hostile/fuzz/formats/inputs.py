"""What users bring: tokenizers, texts in any format, and what an interrupted build has left."""

import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import xxhash

from tests.hostile.fuzz.format import Codec, Consumer, Format, RefusedError, command
from tests.hostile.fuzz.json_text import dumps

TEXT = "the cat sat on a mat 123 é\n"
JSON = Codec(json.loads, lambda files, name, tree: {name: dumps(tree)})


def build_sentencepiece(folder: Path) -> None:
    """A model of SentencePiece."""
    from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
    from tests.data_pipeline.sets import documents

    train_sentencepiece(documents(200), folder, vocab_size=320)


def build_byte_bpe(folder: Path) -> None:
    """A tokenizer.json of byte-level BPE, with the files that Hugging Face has beside it."""
    from data_pipeline.tokenizers.byte_bpe_training import train_byte_bpe
    from tests.data_pipeline.sets import documents

    train_byte_bpe(documents(200), folder, vocab_size=320)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


def build_tiktoken(folder: Path) -> None:
    """A .tiktoken file of the 256 bytes and some pairs."""
    import base64

    from data_pipeline.tokenizers.tiktoken_encoder import GPT2_PATTERN

    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" c", b" ca", b" cat", b"at", b" s"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "cl100k_base.tiktoken").write_text("\n".join(lines) + "\n")
    (folder / "keepstep.json").write_text(json.dumps({"pattern": GPT2_PATTERN, "end_of_document": "<|endoftext|>"}))


def encoded(folder: Path, out: Path) -> str:
    """The ids of a text, and the files that a data set would store."""
    from data_pipeline.tokenizers.tokenizer import load_tokenizer, tokenizer_files

    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode_batch([TEXT, "<|endoftext|>"])
    assert all(0 <= token < tokenizer.vocab_size for row in ids for token in row), "ids beyond the vocabulary"
    return f"{ids} {tokenizer.decode(ids[0])!r} {tokenizer.end_of_document} {sorted(tokenizer_files(folder))}"


def _jsonl() -> bytes:
    from tests.data_pipeline.sets import documents

    return b"".join(dumps({"text": text, "meta": {"n": n}}) + b"\n" for n, text in enumerate(documents(30)))


def _writes(name: str, encode: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        (folder / name).write_bytes(encode(_jsonl()))

    return build


def _zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def _parquet(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in _jsonl().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), folder / "in.parquet", row_group_size=10)


def read(folder: Path, out: Path) -> str:
    """The texts of all records, and the problems of records without text."""
    from data_pipeline.sources.inputs import list_inputs
    from data_pipeline.sources.readers import cut_file, read_records
    from data_pipeline.sources.records import ReadOptions
    from data_pipeline.sources.tasks import divide_into_tasks

    options = ReadOptions(max_document_bytes=1 << 20)
    files = list_inputs([str(folder)])
    found = xxhash.xxh3_64()
    for task in divide_into_tasks(files, 1000, lambda file: cut_file(file, options, 1000)):
        for part in task:
            for record in read_records(files[part.file], part, options):
                found.update(f"{record.text!r} {record.problem} {record.repaired}\n".encode())
    return found.hexdigest()


def interrupted(folder: Path) -> None:
    """A build that was stopped when all documents were tokenized."""
    from tests.data_pipeline.sets import documents, write_jsonl

    os.chdir(folder)
    build_sentencepiece(Path("tokenizer"))
    write_jsonl(Path("in.jsonl"), documents(60))
    _build_here("--share", "0/1")


def finished(folder: Path, out: Path) -> str:
    """The rows of the data set that the continued build makes."""
    from data_pipeline.shards.dataset import DataSet

    os.chdir(folder)
    _build_here()
    manifest = DataSet("set").manifest
    return f"{manifest.fingerprint} {manifest.counts} {manifest.lengths}"


def _build_here(*options: str) -> None:
    """Build `set` with relative paths: the plan of a build names its inputs."""
    command("data", "build", "in.jsonl", "--out", "set", "--tokenizer", "tokenizer", *OPTIONS, *options)


OPTIONS = ("--seq-len", "32", "--workers", "1", "--validation-share", "0.1")
OPEN = "everything: the file is the user's; a reader accepts it, or refuses it with one line"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "keepstep.json")
ENCODE, READ = [Consumer("encode", encoded, exact=False)], [Consumer("read", read, exact=False)]
WORK = "set.work"

FORMATS = [
    Format("tokenizer-model", build_sentencepiece, [("tokenizer.model", None)], ENCODE, OPEN),
    Format("tokenizer-json", build_byte_bpe, [(name, JSON) for name in TOKENIZER_FILES], ENCODE, OPEN),
    Format(
        "tokenizer-tiktoken", build_tiktoken, [("cl100k_base.tiktoken", None), ("keepstep.json", JSON)], ENCODE, OPEN
    ),
    Format("input-jsonl", _writes("in.jsonl", bytes), [("in.jsonl", None)], READ, OPEN),
    Format("input-text", _writes("in.txt", bytes), [("in.txt", None)], READ, OPEN),
    Format("input-gzip", _writes("in.jsonl.gz", gzip.compress), [("in.jsonl.gz", None)], READ, OPEN),
    Format("input-zstd", _writes("in.jsonl.zst", _zstd), [("in.jsonl.zst", None)], READ, OPEN),
    Format("input-xz", _writes("in.jsonl.xz", lzma.compress), [("in.jsonl.xz", None)], READ, OPEN),
    Format("input-parquet", _parquet, [("in.parquet", None)], READ, OPEN),
    Format(
        "build-work",
        interrupted,
        [
            (f"{WORK}/plan.json", JSON),
            (f"{WORK}/task-000000.json", JSON),
            (f"{WORK}/task-000000.tokens", None),
            (f"{WORK}/task-000000.documents", None),
            (f"{WORK}/lock", None),
        ],
        [Consumer("finish", finished, errors=(RefusedError,))],
        "nothing",
    ),
]
