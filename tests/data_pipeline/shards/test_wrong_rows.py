import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards.cache import BlockCache
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest_file import write_manifest
from data_pipeline.shards.rows_reader import RowReader
from data_pipeline.shards.shard_file import ShardShape, decode_rows, problem_of_rows
from tests.data_pipeline.conftest import Built
from tests.data_pipeline.sets import edit_manifest, make_version_1


def read_all(folder: Path) -> None:
    dataset = DataSet(str(folder))
    reader = RowReader(dataset, "train", 0, BlockCache(1 << 20))
    rows = np.arange(reader.rows)
    reader.gather(rows, np.zeros_like(rows), np.zeros_like(rows))


def test_a_token_id_outside_the_vocabulary_is_refused(built: Built, tmp_path: Path) -> None:
    shutil.copytree(built.path, tmp_path / "set")
    write_manifest(tmp_path / "set", replace(built.manifest, vocab_size=100))
    with pytest.raises(DataError, match=r"block 0, train rows 0 to 3 .*: token id \d+ is not in the vocabulary of 100"):
        read_all(tmp_path / "set")


def test_a_row_with_more_tokens_in_use_than_it_has_is_refused() -> None:
    shape = ShardShape(1, 4, 1, 2)
    rows = np.array([[5, 0, 1, 2, 3, 4]], "<u2")
    assert problem_of_rows(rows, shape, 100) == "a row of 4 tokens has 5 in use"
    rows[0, 0] = 4
    assert problem_of_rows(rows, shape, 100) is None


def test_a_shard_with_additional_bytes_is_refused(built: Built, tmp_path: Path) -> None:
    shutil.copytree(built.path, tmp_path / "set")
    shard = tmp_path / "set" / built.manifest.splits["train"].shards[0].file
    shard.write_bytes(shard.read_bytes() + b"\0\0\0\0")
    with pytest.raises(DataError, match=r"train-00000.shard has \d+ bytes, but the manifest states \d+; restore"):
        read_all(tmp_path / "set")


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_block_of_another_size_is_refused(compression: str) -> None:
    shape = ShardShape(1, 4, 1, 2, compression)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"the block has 16 bytes instead of 12|the block cannot be decompressed"):
        decode_rows(bytes(16), shape, 0)


def test_an_old_manifest_has_no_hashes(built: Built, tmp_path: Path) -> None:
    shutil.copytree(built.path, tmp_path / "set")
    edit_manifest(tmp_path / "set", make_version_1)
    manifest = DataSet(str(tmp_path / "set")).manifest
    assert (manifest.hashes, manifest.validation_below) == ({}, None)
    assert manifest.fingerprint == built.manifest.fingerprint
