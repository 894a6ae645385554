"""Inputs and tokenizers that are damaged, or no files at all, are refused by name: in one line, and without a hang."""

import gzip
import json
import lzma
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_pipeline.errors import DataError
from data_pipeline.sources.files import Part, local_file
from data_pipeline.sources.inputs import list_inputs
from data_pipeline.sources.readers import cut_file, read_records
from data_pipeline.sources.records import NOT_JSON, ReadOptions
from data_pipeline.tokenizers.tokenizer import load_tokenizer, tokenizer_files
from launch.cli import main

TEXTS = [f"{number} the cat sat on the mat and saw {number * 7} dogs" for number in range(300)]


def special(folder: Path, kind: str) -> Path:
    """A FIFO, a socket or a device in a folder that has a good file as well."""
    folder.mkdir()
    (folder / "good.txt").write_text("a good text\n")
    path = folder / kind
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(path))
        case _:
            path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
@pytest.mark.parametrize("named", ["itself", "folder", "glob"])
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, kind: str, named: str, tokenizer: Path) -> None:
    path = special(tmp_path / "in", kind)
    given = {"itself": str(path), "folder": str(path.parent), "glob": f"{path.parent}/*"}[named]
    with pytest.raises(DataError, match=rf"cannot read .*{kind}: .*{kind} is (a FIFO|a socket|a device)"):
        list_inputs([given])
    command = ["data", "build", given, "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer), "--workers", "1"]
    assert main(command) == 2
    assert main(["data", "tokenizer", given, "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_a_fifo_in_a_saved_data_set_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "state.json")
    with pytest.raises(DataError, match=r"state.json is a FIFO"):
        list_inputs([f"hf:{tmp_path}"])


def test_a_file_that_became_a_fifo_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    file = local_file(tmp_path / "a.txt")
    (tmp_path / "a.txt").unlink()
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a.txt is a FIFO"):
        list(read_records(file, Part(0), ReadOptions()))


def test_a_row_that_is_nested_too_deeply_is_a_row_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": ' + "[" * 100_000 + "\n" + '{"a":' * 20_000 + "\n")
    records = list(read_records(local_file(tmp_path / "a.jsonl"), Part(0), ReadOptions()))
    assert [record.text for record in records] == ["good", None, None]
    assert {record.problem for record in records[1:]} == {NOT_JSON}


def stored(kind: str) -> bytes:
    """The texts in a format."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    match kind:
        case "gzip":
            return gzip.compress(lines)
        case "zstd":
            return zstandard.ZstdCompressor().compress(lines)
        case "xz":
            return lzma.compress(lines)
        case _:
            sink = pa.BufferOutputStream()
            pq.write_table(pa.table({"text": TEXTS}), sink, row_group_size=50)
            return sink.getvalue().to_pybytes()


def read_parts(file: Path) -> None:
    found, options = local_file(file), ReadOptions(on_error="replace")
    for part in cut_file(found, options, 1000) or [Part(0)]:
        list(read_records(found, part, options))


def error_of(action: Callable[[], object]) -> str:
    """The message of the DataError that the action raises; empty if it succeeds."""
    try:
        action()
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["gzip", "zstd", "xz", "parquet"])
def test_damage_of_an_input_is_one_line_or_harmless(tmp_path: Path, kind: str) -> None:
    content = stored(kind)
    source = random.Random(kind)
    file = tmp_path / f"in.{kind}"
    for number in range(150):
        changed = bytearray(content)
        if number % 3 == 0:
            del changed[source.randrange(len(content)) :]
        for _ in range(number % 3):
            if changed:
                changed[source.randrange(len(changed))] = source.randrange(256)
        file.write_bytes(changed)
        said = error_of(lambda: read_parts(file))
        assert len(said.splitlines()) <= 1
        assert len(said) < 2000


@pytest.fixture
def both(tokenizer: Path, tmp_path: Path) -> Path:
    """A folder with a SentencePiece model and files beside it, to be changed."""
    folder = Path(shutil.copytree(tokenizer, tmp_path / "tokenizer"))
    (folder / "keepstep.json").write_text(json.dumps({"end_of_document": "</s>"}))
    return folder


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("keepstep.json", "[1]"),
        ("keepstep.json", "{"),
        ("keepstep.json", '{"end_of_document": [1]}'),
        ("keepstep.json", '{"end_of_document": "</s>", "beginning_of_document": {"a": 1}}'),
        ("keepstep.json", '{"a":' * 5000),
        ("tokenizer_config.json", '{"eos_token": 7}'),
        ("tokenizer_config.json", "\0"),
        ("tokenizer.model", "x"),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_one_line(both: Path, name: str, content: str) -> None:
    if name == "tokenizer_config.json":
        (both / "keepstep.json").unlink()
    (both / name).write_text(content)
    for read in (load_tokenizer, tokenizer_files):
        if (read, name) == (tokenizer_files, "tokenizer.model"):
            continue  # it copies the bytes
        with pytest.raises(DataError) as caught:
            read(both)
        assert len(str(caught.value).splitlines()) == 1


def test_a_flipped_byte_of_a_model_is_one_line_or_another_model(both: Path) -> None:
    content = (both / "tokenizer.model").read_bytes()
    source = random.Random(3)
    for _ in range(200):
        changed = bytearray(content)
        changed[source.randrange(len(content))] = source.randrange(256)
        (both / "tokenizer.model").write_bytes(changed)
        assert len(error_of(lambda: load_tokenizer(both)).splitlines()) <= 1


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "BPE", "vocab": {}, "merges": []}},
        {"model": {"type": "Unigram", "unk_id": 5, "vocab": []}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"added_tokens": [{"id": 2**40, "content": "x"}]},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
    ],
)
def test_a_tokenizer_json_that_cannot_be_is_one_line(tmp_path: Path, change: dict[str, object]) -> None:
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
               "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": None}  # fmt: skip
    content["model"] = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | change))
    with pytest.raises(DataError) as caught:
        load_tokenizer(tmp_path, "<end>")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json", "x.tiktoken"])
def test_a_fifo_in_place_of_a_tokenizer_does_not_hang(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match=r"no tokenizer in|is a FIFO"):
            load_tokenizer(path)


def test_a_tokenizer_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    for name in ("tokenizer.model", "tokenizer.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(10**12)  # a hole: it takes no space
        with pytest.raises(DataError, match=r"has 1,000,000,000,000 bytes, more than the 1,073,741,824"):
            load_tokenizer(tmp_path / name, "</s>")
