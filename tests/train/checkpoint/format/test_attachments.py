"""A checkpoint carries its recipe and tokenizer, and trusts no name in a manifest."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec  # pyright: ignore[reportMissingTypeStubs]
import pytest
import torch

from train.checkpoint.format.attachments import Attachment, decode_attachments, plain_files, safe_name
from train.checkpoint.format.compare import differences
from train.checkpoint.format.manifest import Manifest, ShardFile, decode, encode
from train.checkpoint.format.verify import find_faults, read_attachment, read_manifest
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.checkpoint.stores.copy import copy
from train.checkpoint.stores.open import open_root
from train.config import CheckpointConfig
from train.errors import CheckpointError

ZEROS = "0" * 16
FILES = {"tokenizer.json": b"{}", "keepstep.json": b'{"end_of_document": "<e>"}'}
EMPTY = Manifest(1, 2, None, {}, {}, {}, [], {}, "", [], {})
UNSAFE = [
    "../secret", "tokenizer/../secret", "/etc/passwd", "tokenizer//x", "tokenizer/.hidden", "x/b", "~/x", "",
    "tokenizer/", "tokenizer/a b", "tokenizer/a\n", "tokenizer\\x", "x" * 300, "tokenizer/\u0430", None, 3, "..", ".",
    "0a/../tokenizer/x", "tokenizer/tokenizer/x",
]  # fmt: skip


def save(root: Path | str, **options: Any) -> None:
    settings = CheckpointConfig(background=False)
    manager = CheckpointManager(root, settings, {"a": 1}, lambda *_, **__: None, **options)
    manager.save(SavedProgress(1, 2), {"model.w": torch.ones(3)}, {})
    manager.close()


@pytest.mark.parametrize("name", UNSAFE)
def test_a_name_that_could_leave_the_folder_is_refused_wherever_it_stands(name: Any) -> None:
    with pytest.raises(CheckpointError, match="the manifest names the file"):
        safe_name(name)
    attached = encode(replace(EMPTY, attachments=[Attachment(name, 0, ZEROS)]))
    shard = encode(replace(EMPTY, files=[ShardFile(name, 8, 8, ZEROS)]))
    for manifest in (attached, shard):
        with pytest.raises(CheckpointError, match="the manifest names the file"):
            decode(manifest)


@pytest.mark.parametrize("name", ["tokenizer/tokenizer.model", "0123abcd/tokenizer/tokenizer.json"])
def test_plain_names_are_accepted(name: str) -> None:
    assert safe_name(name) == name
    assert decode_attachments([{"name": name, "bytes": 1, "xxh3": ZEROS}]) == [Attachment(name, 1, ZEROS)]


def test_an_attachment_outside_the_tokenizer_folder_is_refused() -> None:
    with pytest.raises(CheckpointError, match="which is no 'tokenizer/NAME'"):
        decode_attachments([{"name": "shard-00000.safetensors", "bytes": 1, "xxh3": ZEROS}])


def test_a_manifest_without_them_has_the_bytes_of_earlier_versions() -> None:
    assert b"recipe" not in encode(EMPTY)
    assert b"attachments" not in encode(EMPTY)
    assert decode(encode(EMPTY)) == EMPTY


@pytest.mark.parametrize("store", ["local", "memory"])
def test_recipe_and_tokenizer_are_saved_verified_counted_and_copied(store: str, tmp_path: Path) -> None:
    places = [tmp_path / "one", "memory://attachments/two"]
    first, second = places if store == "local" else places[::-1]
    save(first, recipe={"model": {"d_model": 8}}, attachments=FILES)
    copied = copy(open_root(first).folder(1), open_root(second))
    for folder in (open_root(first).folder(1), copied):
        manifest, _ = read_manifest(folder)
        assert manifest.recipe == {"model": {"d_model": 8}}
        assert {a.plain_name: read_attachment(folder, a) for a in manifest.attachments} == FILES
        assert manifest.file_bytes == sum(file.bytes for file in manifest.files) + 2 + 26
        assert find_faults(folder) == []
    fsspec.filesystem("memory").rm("/attachments", recursive=True)  # pyright: ignore


def test_a_difference_in_the_recipe_is_not_reported_and_one_in_the_tokenizer_is(tmp_path: Path) -> None:
    save(tmp_path / "a", recipe={"runs_dir": "a"}, attachments=FILES)
    save(tmp_path / "b", recipe={"runs_dir": "b"}, attachments=FILES)
    save(tmp_path / "c", attachments=FILES | {"tokenizer.json": b"[]"})
    save(tmp_path / "d")
    a, b, c, d = (tmp_path / name / "step-00000001" for name in "abcd")
    assert list(differences(a, b)) == []
    assert [line.split(":")[0] for line in differences(a, c)] == ["tokenizer/tokenizer.json"]
    assert list(differences(a, d)) == [], "an earlier version has none"


def test_only_plain_files_of_a_folder_are_attached(tmp_path: Path) -> None:
    for name in (*FILES, ".DS_Store", "tokenizer (1).json"):
        (tmp_path / name).write_bytes(FILES.get(name, b"x"))
    (tmp_path / "folder").mkdir()
    assert plain_files(tmp_path) == FILES
