import json
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import NAME, SPLITS
from data_pipeline.shards.manifest_file import parse_manifest
from tests.data_pipeline.conftest import Built


def test_a_written_manifest_is_read_back(built: Built) -> None:
    read = parse_manifest((built.path / NAME).read_bytes(), "set")
    assert read.fingerprint == built.manifest.fingerprint
    assert read.splits == built.manifest.splits


def test_the_fingerprint_depends_on_rows_and_tokenizer_and_not_on_paths(built: Built) -> None:
    manifest = built.manifest
    assert replace(manifest, plan="other", counts={}).fingerprint == manifest.fingerprint
    assert replace(manifest, tokenizer={"tokenizer.model": "other"}).fingerprint != manifest.fingerprint
    train = manifest.splits["train"]
    other = replace(train, shards=(replace(train.shards[0], xxh3="0"), *train.shards[1:]))
    assert replace(manifest, splits={**manifest.splits, "train": other}).fingerprint != manifest.fingerprint


def test_a_changed_manifest_is_refused(built: Built) -> None:
    content = json.loads((built.path / NAME).read_bytes())
    content["splits"]["train"]["shards"][0]["rows"] += 1
    with pytest.raises(DataError, match=r"set/manifest.json is damaged: it states the checksum"):
        parse_manifest(json.dumps(content).encode(), "set")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format": "x"}', b"not json"])
def test_another_file_is_refused(data: bytes) -> None:
    with pytest.raises(DataError, match=r"set/manifest.json is not a Keepstep manifest"):
        parse_manifest(data, "set")


def test_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"format 'keepstep-data' version 99; this Keepstep reads keepstep-data version 1 and 2"
    ):
        parse_manifest(b'{"format": "keepstep-data", "version": 99}', "set")


def test_a_manifest_with_the_earlier_name_of_the_validation_split_is_read() -> None:
    """tests/earlier_version has a data set that was built when the split was called `held_out`."""
    data = (Path(__file__).parents[2] / "earlier_version" / "data" / NAME).read_bytes()
    manifest = parse_manifest(data, "set")
    assert tuple(manifest.splits) == SPLITS
    assert manifest.splits["validation"].shards[0].file == "shards/held_out-00000.shard"
    assert manifest.fingerprint == "d892aa369895f65f3866b03b32f67d41"
    assert manifest.options["held_out_share"] == 0.1
