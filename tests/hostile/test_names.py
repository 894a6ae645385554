"""Names that come from outside never lead out of their folder, and nothing but a file is opened."""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.build.options import BuildOptions
from data_pipeline.build.repack import repack_dataset
from data_pipeline.build.workers import Pool
from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import NAME, TRAIN
from data_pipeline.stream.stream import open_stream
from data_pipeline.untrusted import (
    NotAFileError,
    TooLargeError,
    UnsafeNameError,
    check_name,
    open_file,
    parse_json,
    read_file,
    safe_path,
)
from launch.cli import main
from tests.data_pipeline.conftest import Built
from tests.data_pipeline.servers import http_server
from tests.data_pipeline.sets import config, edit_manifest, tree

UNSAFE = [
    "", ".", "..", "../x", "a/../x", "/etc/passwd", ".bashrc", "a//b", "a/", "a\0b", "a\nb", "a b", "a\\b", "~", "$x",
    "-x", "x" * 129, "a/b/c/d/e", "\u202ex", 7, None, ["a"], True,
]  # fmt: skip


@pytest.mark.parametrize("name", UNSAFE)
def test_a_name_that_is_not_plain_becomes_no_path(tmp_path: Path, name: object) -> None:
    with pytest.raises(UnsafeNameError, match=r"is not safe"):
        safe_path(tmp_path, name)


def test_a_plain_name_becomes_a_path_in_the_folder(tmp_path: Path) -> None:
    assert safe_path(tmp_path, "shards/train-00000.shard") == tmp_path / "shards/train-00000.shard"
    with pytest.raises(UnsafeNameError, match=r"'b' is not one of a"):
        check_name("b", ("a",))


@pytest.fixture
def special(tmp_path: Path) -> Iterator[Path]:
    """A folder with a FIFO, a socket, a folder, a device and links that lead out of it or to nothing."""
    folder = tmp_path / "special"
    folder.mkdir()
    (tmp_path / "private").write_text("private")
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to(tmp_path / "private")
    (folder / "nothing").symlink_to(tmp_path / "missing")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        yield folder


@pytest.mark.parametrize(
    "name", ["fifo", "socket", "folder", "device", "link", "nothing", "linked/private", "linked/new"]
)
def test_a_path_leads_to_a_file_of_its_folder_or_is_refused(special: Path, name: str) -> None:
    with pytest.raises(NotAFileError, match=r"is (a FIFO|a socket|a folder|a device|a link)"):
        safe_path(special, name)
    if name != "linked/new":
        with pytest.raises(OSError, match=name.partition("/")[0]):
            open_file(special / name, inside=special)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read_file(tmp_path / "x", limit=5) == b"12345"
    with pytest.raises(TooLargeError, match=r"x has 5 bytes, more than the 4"):
        read_file(tmp_path / "x", limit=4)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100, "NaN", '{"a": 1, "a": 1}', '"\\ud800"', "9" * 5000, "", "\xff", "[1,]"]
)
def test_json_that_is_nested_ambiguous_or_damaged_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text.encode("latin-1"))


@pytest.fixture
def forged(built: Built, tmp_path: Path) -> Path:
    """A data set whose tokenizer has a file of a name that leads into the home folder."""
    folder = tmp_path / "data" / "set"
    shutil.copytree(built.path, folder)
    escaping = "../../home/.bashrc"
    (tmp_path / "home").mkdir()
    (folder / "tokenizer" / "x").mkdir()
    content = (folder / "tokenizer" / "tokenizer.model").read_bytes()
    (tmp_path / "data" / "home").mkdir()
    (tmp_path / "data" / "home" / ".bashrc").write_bytes(content)
    edit_manifest(folder, lambda m: m["tokenizer"].update({escaping: m["tokenizer"]["tokenizer.model"]}))
    return folder


def test_a_remote_manifest_cannot_write_outside_of_the_cache(forged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`keepstep run` once wrote the .bashrc of such a data set."""
    cache = forged.parents[1] / "cache" / "deep"
    cache.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(cache))
    before = tree(forged.parents[1])
    with http_server(forged) as (address, _):
        with pytest.raises(DataError, match=r"tokenizer names '../../home/.bashrc'; a tokenizer has the files"):
            open_stream(config(address), seq_len=32)
        assert main(["data", "show", address]) == 2
    assert tree(forged.parents[1]) == before


def test_a_repack_cannot_write_outside_of_its_folder(forged: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    with pytest.raises(DataError, match=r"tokenizer names '../../home/.bashrc'"):
        repack_dataset(str(forged), tmp_path / "out", BuildOptions(seq_len=16), Pool(None))
    assert tree(tmp_path) == before


def test_a_finished_data_set_with_an_escaping_name_is_not_built_again(
    forged: Path, built: Built, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = built.path.with_name("set.jsonl")
    command = ["data", "build", str(inputs), "--out", str(forged), "--tokenizer", str(tokenizer), "--workers", "1"]
    assert main(command) == 2
    assert "tokenizer names" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../private", "shards/../../private", "shards/x.shard", "manifest.json"]
)
def test_a_shard_outside_of_the_data_set_is_not_read(built: Built, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(built.path, tmp_path / "set"))
    shard = built.manifest.splits[TRAIN].shards[0].file
    shutil.copy(folder / shard, tmp_path / "private")
    edit_manifest(folder, lambda m: m["splits"]["train"]["shards"][0].update(file=name))
    with pytest.raises(DataError, match=r"a shard has the name .*; names are shards/SPLIT-NNNNN.shard"):
        DataSet(str(folder))


@pytest.mark.parametrize("file", ["shards/train-00000.shard", "tokenizer/tokenizer.model", "files.json"])
def test_a_link_out_of_a_data_set_is_not_followed(built: Built, tmp_path: Path, file: str) -> None:
    folder = Path(shutil.copytree(built.path, tmp_path / "set"))
    (folder / file).rename(tmp_path / "private")
    (folder / file).symlink_to(tmp_path / "private")
    with pytest.raises(DataError, match=r"is a link that leads out of") as caught:
        read_everything(folder)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("file", ["shards/train-00000.shard", "tokenizer/tokenizer.model", "files.json", NAME])
def test_a_fifo_in_a_data_set_does_not_hang(built: Built, tmp_path: Path, file: str) -> None:
    folder = Path(shutil.copytree(built.path, tmp_path / "set"))
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(DataError, match=r"is a FIFO|no data set in"):
        read_everything(folder)


def read_everything(folder: Path) -> None:
    dataset = DataSet(str(folder))
    dataset.files()
    dataset.tokenizer()
    with open_stream(config(folder), seq_len=32) as stream:
        next(stream.steps(first_step=0, global_batch_size=2, micro_batch_size=2, rank=0, world_size=1))


def test_a_planted_file_beside_the_tokenizer_is_not_read(built: Built, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(built.path, tmp_path / "set"))
    (folder / "tokenizer" / "keepstep.json").write_text(json.dumps({"end_of_document": "<s>"}))
    with pytest.raises(DataError, match=r"keepstep.json is not in the manifest; remove it"):
        DataSet(str(folder)).tokenizer()


def test_a_tokenizer_other_than_the_manifest_states_is_refused(built: Built, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(built.path, tmp_path / "set"))
    edit_manifest(folder, lambda m: m.update(end_of_document=1))
    with pytest.raises(DataError, match=r"ends a document with 2, but the manifest states 320 and 1"):
        DataSet(str(folder)).tokenizer()
