from pathlib import Path

import pytest

from data_pipeline.build.folder import building_folder, work_folder
from data_pipeline.build.prepare import BuildOptions
from data_pipeline.build.repack import repack_dataset
from data_pipeline.build.workers import Pool
from data_pipeline.errors import DataError
from tests.data_pipeline.conftest import Built
from tests.data_pipeline.sets import build, tree

GROUPS = {"task_bytes": 3000, "group_tokens": 2000, "shard_bytes": 9000, "validation_share": 0.05}


def repack(source: Path, out: Path, **options: object):
    chosen = BuildOptions(**{"seq_len": 32, **options})  # type: ignore[arg-type]
    return repack_dataset(str(source), out, chosen, Pool(None))


@pytest.mark.parametrize(
    ("seq_len", "packing", "compression"),
    [(20, "best-fit", "none"), (50, "concatenate", "zstd"), (1, "best-fit", "none")],
)
def test_a_repacked_data_set_is_the_one_that_a_build_would_have_made(
    built: Built, tokenizer: Path, tmp_path: Path, seq_len: int, packing: str, compression: str
) -> None:
    first = build(tmp_path / "first", built.texts, tokenizer, packing="concatenate", **GROUPS)
    options = {"seq_len": seq_len, "packing": packing, "compression": compression}
    wanted = build(tmp_path / "wanted", built.texts, tokenizer, **options, **GROUPS)
    got = repack(tmp_path / "first", tmp_path / "got", **options)
    assert first.fingerprint != wanted.fingerprint
    assert got.fingerprint == wanted.fingerprint
    assert {name for name, data in tree(tmp_path / "got").items() if data != tree(tmp_path / "wanted").get(name)} <= {
        "manifest.json",  # inputs, plan
        "files.json",
    }
    assert (got.counts, got.lengths, got.splits) == (wanted.counts, wanted.lengths, wanted.splits)


def test_there_and_back_is_the_same(built: Built, tmp_path: Path) -> None:
    repack(built.path, tmp_path / "there", seq_len=7)
    assert repack(tmp_path / "there", tmp_path / "back", seq_len=32).fingerprint == built.manifest.fingerprint
    assert not work_folder(tmp_path / "back").exists()
    assert not building_folder(tmp_path / "back").exists()


def test_a_damaged_data_set_is_not_repacked(built: Built, tmp_path: Path) -> None:
    for name, data in tree(built.path).items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    shard = tmp_path / "copy" / built.manifest.splits["train"].shards[0].file
    data = bytearray(shard.read_bytes())
    data[500] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"train-00000.shard, block 1, train rows 4 to 7 of .*the checksum is wrong"):
        repack(tmp_path / "copy", tmp_path / "out", seq_len=8)
    assert not (tmp_path / "out").exists()
