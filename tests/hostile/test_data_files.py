"""A data set that is damaged or forged is refused in one line with exit code 2, whatever byte or number was changed."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from data_pipeline.build.options import BuildOptions
from data_pipeline.build.repack import repack_dataset
from data_pipeline.build.workers import Pool
from data_pipeline.errors import DataError
from data_pipeline.shards.cache import BlockCache
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import FILES, NAME, TRAIN
from data_pipeline.shards.manifest_file import write_manifest
from data_pipeline.shards.rows_reader import RowReader
from data_pipeline.shards.shard_file import HEADER_BYTES, ShardShape, decode_origins, decode_rows
from data_pipeline.stream.saved_state import merge_states
from data_pipeline.stream.stream import open_stream
from launch.cli import main
from tests.data_pipeline.conftest import Built
from tests.data_pipeline.sets import config, edit_manifest, make_version_1

EARLIER = Path(__file__).parents[1] / "earlier_version" / "data"


@pytest.fixture
def folder(built: Built, tmp_path: Path) -> Path:
    """A copy of a data set, to be changed."""
    return Path(shutil.copytree(built.path, tmp_path / "set"))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command ends, with exit code 2."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_every_flipped_digit_of_a_manifest_is_noticed(folder: Path) -> None:
    manifest = folder / NAME
    content = manifest.read_bytes()
    digits = [at for at, byte in enumerate(content) if chr(byte).isdecimal()]
    source = random.Random(1)
    for at in source.sample(digits, min(400, len(digits))):
        other = source.choice([digit for digit in b"0123456789" if digit != content[at]])
        manifest.write_bytes(content[:at] + bytes([other]) + content[at + 1 :])
        with pytest.raises(DataError, match=r"manifest.json (is damaged|is not a Keepstep manifest|has format)"):
            DataSet(str(folder))


def test_every_flipped_bit_of_a_manifest_is_noticed_or_means_the_same(folder: Path, built: Built) -> None:
    manifest = folder / NAME
    content = manifest.read_bytes()
    for at in random.Random(2).sample(range(len(content)), 400):
        changed = bytearray(content)
        changed[at] ^= 1 << (at % 7)
        manifest.write_bytes(changed)
        try:
            assert DataSet(str(folder)).manifest == built.manifest  # a space that became another space
        except DataError:
            continue


def test_a_flipped_digit_of_the_rows_ends_every_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a checksum, such a digit dropped rows and reordered a resume, while the audit said complete."""
    text = (folder / NAME).read_text()
    rows = json.loads(text)["splits"]["train"]["rows"]
    (folder / NAME).write_text(text.replace(f'"rows": {rows}', f'"rows": {rows - 1}', 1))
    recipe = folder.parent / "recipe.yaml"
    recipe.write_text(
        f"name: x\nmodel: {{vocab_size: 320, seq_len: 32, n_layers: 1, n_heads: 1, d_model: 8}}\ndata: {{sources: "
        f"[{{path: {folder}}}]}}\noptim: {{lr: 1e-3, warmup_steps: 1}}\n"
        "train: {steps: 2, global_batch_size: 2, micro_batch_size: 1}\n"
    )
    for command in (["show", str(folder)], ["audit", str(recipe)], ["trace", str(recipe), "--step", "1"]):
        assert "manifest.json is damaged: it states the checksum" in refusal(capsys, "data", *command)
    out = str(folder.parent / "out")
    assert "is damaged" in refusal(capsys, "data", "repack", str(folder), "--out", out, "--workers", "1")
    assert not Path(out).exists()


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "rows": lambda m: m["splits"]["train"].update(rows=m["splits"]["train"]["rows"] - 1),
    "tokens": lambda m: m["splits"]["train"].update(tokens=m["splits"]["train"]["tokens"] + 1),
    "documents": lambda m: m["splits"]["train"].update(documents=m["splits"]["train"]["documents"] - 1),
    "padding": lambda m: m["splits"]["train"].update(padding=-1),
    "groups": lambda m: m["splits"]["train"].update(groups=[0, 10**9]),
    "no groups": lambda m: m["splits"]["train"].update(groups=[]),
    "a true number": lambda m: m["splits"]["train"].update(documents_cut=True),
    "a fraction": lambda m: m.update(vocab_size=320.5),
    "a huge number": lambda m: m.update(row_tokens=10**30),
    "no tokens in a row": lambda m: m.update(row_tokens=0),
    "token bytes": lambda m: m.update(token_bytes=3),
    "compression": lambda m: m.update(compression="gzip"),
    "a third split": lambda m: m["splits"].update(test=m["splits"]["train"]),
    "one split": lambda m: m["splits"].pop("validation"),
    "a small shard": lambda m: m["splits"]["train"]["shards"][0].update(bytes=10),
    "lengths": lambda m: m["lengths"].update({"1": 7}),
    "counts": lambda m: m["counts"].update({"dropped: other": 1}),
    "hashes": lambda m: m["hashes"].update(train=10**6),
    "an additional member": lambda m: m.update(extra=1),
    "no checksum of files.json": lambda m: m.update(files_xxh3=""),
    "a list": lambda m: m.update(splits=[]),
    "a control character": lambda m: m["counts"].update({"\x1b[2J": 0}),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_numbers_that_do_not_agree_are_refused_although_the_checksum_is_right(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    edit_manifest(folder, FORGERIES[name])
    assert "manifest.json" in refusal(capsys, "data", "show", str(folder))


def test_a_manifest_without_a_checksum_is_read_only_as_version_1(folder: Path) -> None:
    edit_manifest(folder, make_version_1)
    assert DataSet(str(folder)).manifest.files_xxh3 == ""
    edit_manifest(folder, lambda m: m.update(version=2))
    with pytest.raises(DataError, match=r"states the checksum 'None'"):
        DataSet(str(folder))


def test_counts_of_an_earlier_version_are_compared(tmp_path: Path) -> None:
    shutil.copytree(EARLIER, tmp_path / "set")
    assert DataSet(str(tmp_path / "set")).files()
    edit_manifest(tmp_path / "set", lambda m: m["splits"]["train"].update(rows=423))
    with pytest.raises(DataError, match=r"the split train has 423 rows, but its shards have 424"):
        DataSet(str(tmp_path / "set"))


@pytest.mark.parametrize("content", [b"[]", b'["other.jsonl"]', b"{}", b"[1]", b"", b"[" * 5000, b"\xff"])
def test_a_changed_files_json_is_refused(folder: Path, content: bytes) -> None:
    (folder / FILES).write_bytes(content)
    with pytest.raises(DataError, match=r"files.json( is damaged|, bytes 0 to the end: cannot mmap an empty file)"):
        DataSet(str(folder)).files()


@pytest.mark.parametrize("text", ['{"a":' * 5000, "[" * 5000, '{"format": "keepstep-data", "format": "x"}', "NaN"])
def test_a_nested_or_ambiguous_manifest_is_one_line(
    folder: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / NAME).write_text(text)
    assert "is not a Keepstep manifest" in refusal(capsys, "data", "show", str(folder))


def test_a_manifest_of_ten_gigabytes_is_not_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / NAME).open("wb") as file:
        file.truncate(10 * 10**9)  # a hole: it takes no space
    assert "has 10,000,000,000 bytes, more than the 1,073,741,824" in refusal(capsys, "data", "show", str(folder))


def test_a_shard_that_is_missing_or_cut_is_exit_code_2(folder: Path, built: Built) -> None:
    shard = folder / built.manifest.splits[TRAIN].shards[0].file
    content = shard.read_bytes()
    for changed in (content[: len(content) // 2], b"", None):
        shard.write_bytes(changed) if changed is not None else shard.unlink()
        with pytest.raises(DataError) as caught:
            read_rows(folder)
        assert caught.value.exit_code == 2


def read_rows(folder: Path) -> None:
    reader = RowReader(DataSet(str(folder)), TRAIN, 0, BlockCache(1 << 20))
    rows = np.arange(reader.rows)
    reader.gather(rows, np.zeros_like(rows), np.zeros_like(rows))


def test_an_index_that_points_elsewhere_is_refused(folder: Path, built: Built) -> None:
    entry = built.manifest.splits[TRAIN].shards[0]
    shape, shard = built.manifest.shape(entry.rows), folder / entry.file
    content = shard.read_bytes()
    index = np.frombuffer(content[-shape.index_bytes :], "<u8").copy()
    index[1] = 1 << 62
    shard.write_bytes(content[: -shape.index_bytes] + index.tobytes())
    checksum = xxhash.xxh3_64_hexdigest(content[:HEADER_BYTES] + index.tobytes())
    train = built.manifest.splits[TRAIN]
    forged = replace(train, shards=(replace(entry, xxh3=checksum), *train.shards[1:]))
    write_manifest(folder, replace(built.manifest, splits={**built.manifest.splits, TRAIN: forged}))
    with pytest.raises(DataError, match=r"the index of .*train-00000.shard has blocks that do not follow each other"):
        read_rows(folder)


def test_a_block_that_would_decompress_to_gigabytes_is_refused_before_it_does() -> None:
    shape = ShardShape(1, 4, 1, 2, "zstd")
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(1 << 28))
    with pytest.raises(DataError, match=r"the block has 268435456 bytes decompressed, more than 12"):
        decode_rows(bomb, shape, 0)
    with pytest.raises(DataError, match=r"the block has 268435456 bytes decompressed, more than 104"):
        decode_origins(bomb, shape, 0)


@pytest.mark.parametrize("starts", [[0, 2], [1, 1], [0, 0, 1], [0]])
def test_origins_that_are_not_those_of_the_rows_are_refused(starts: list[int]) -> None:
    shape = ShardShape(1, 4, 1, 2)
    with pytest.raises(DataError, match=r"the origins of block 0"):
        decode_origins(np.array(starts, "<u4").tobytes() + bytes(24), shape, 0)


def test_a_data_set_without_its_options_is_not_repacked(folder: Path, tmp_path: Path) -> None:
    edit_manifest(folder, lambda m: m["options"].update(group_tokens="all"))
    with pytest.raises(DataError, match=r"was built with group_tokens 'all', which is no size"):
        repack_dataset(str(folder), tmp_path / "out", BuildOptions(seq_len=16), Pool(None))


STATES: dict[str, object] = {
    "weights": [],
    "weights ": "x",
    "counters": [[1]],
    "quarantined": [[0, -1, "x"]],
    "quarantined ": [[0, 0, "\r\n"]],
    "samples": True,
    "batch_sizes": [[1, 4]],
    "batch_sizes ": [[0, 0]],
    "sources": [1],
    "step": None,
    "seed": "1",
}


@pytest.mark.parametrize("name", STATES)
def test_a_forged_state_of_the_data_is_one_line(built: Built, name: str) -> None:
    with open_stream(config(built.path), seq_len=32) as stream:
        next(stream.steps(first_step=0, global_batch_size=2, micro_batch_size=2, rank=0, world_size=1))
        state = json.loads(json.dumps(stream.state(1)))
        stream.restore([state])
        with pytest.raises(DataError, match=r"the checkpoint has no valid state of the data"):
            stream.restore([state | {name.strip(): STATES[name]}])
        forged = {**state["sources"][0], "fingerprint": "\r\n"}
        with pytest.raises(DataError, match=r"fingerprint: .*one line without control characters"):
            stream.restore([state | {"sources": [forged]}])
        forged = {**state["sources"][0], "tokenizer": {"\r\n": "x"}}
        with pytest.raises(DataError, match=r"\A[^\r\n]*one line without control characters"):
            stream.restore([state | {"sources": [forged]}])
        with pytest.raises(DataError, match=r"quarantined block 99999 of source 0"):
            stream.restore([state | {"quarantined": [[0, 99999, "x"]]}])
    with pytest.raises(DataError):
        merge_states([{}])
