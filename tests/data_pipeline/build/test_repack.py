from pathlib import Path

import pytest

from data_pipeline.build.folder import building_folder, work_folder
from data_pipeline.build.options import BuildOptions
from data_pipeline.build.repack import repack_dataset
from data_pipeline.build.workers import Pool
from data_pipeline.errors import DataError
from tests.data_pipeline.conftest import Built
from tests.data_pipeline.sets import Recorder, build, tree

GROUPS = {"task_bytes": 3000, "group_tokens": 2000, "shard_bytes": 9000, "validation_share": 0.05}


def repack(source: Path, out: Path, **options: object):
    chosen = BuildOptions(**{"seq_len": 32, **options})  # type: ignore[arg-type]
    return repack_dataset(str(source), out, chosen, Pool(None))


@pytest.mark.parametrize(
    ("seq_len", "packing", "compression"),
    [(20, "best-fit", "none"), (50, "concatenate", "zstd"), (1, "best-fit", "none")],
)
def test_a_repacked_data_set_equals_a_build_with_the_same_options(
    built: Built, tokenizer: Path, tmp_path: Path, seq_len: int, packing: str, compression: str
) -> None:
    first = build(tmp_path / "first", built.texts, tokenizer, packing="concatenate", **GROUPS)
    options = {"seq_len": seq_len, "packing": packing, "compression": compression}
    wanted = build(tmp_path / "wanted", built.texts, tokenizer, **options, **GROUPS)
    got = repack(tmp_path / "first", tmp_path / "got", **options)
    assert first.fingerprint != wanted.fingerprint
    assert got.fingerprint == wanted.fingerprint
    assert {name for name, data in tree(tmp_path / "got").items() if data != tree(tmp_path / "wanted").get(name)} <= {
        "manifest.json",  # has other inputs and another plan
        "files.json",
    }
    assert (got.counts, got.lengths, got.splits) == (wanted.counts, wanted.lengths, wanted.splits)


def test_repacking_to_another_length_and_back_gives_the_same_rows(built: Built, tmp_path: Path) -> None:
    repack(built.path, tmp_path / "short", seq_len=7)
    assert repack(tmp_path / "short", tmp_path / "back", seq_len=32).fingerprint == built.manifest.fingerprint
    assert not work_folder(tmp_path / "back").exists()
    assert not building_folder(tmp_path / "back").exists()


def test_a_damaged_data_set_is_refused(built: Built, tmp_path: Path) -> None:
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


def test_the_progress_of_every_stage_is_reported_in_tokens(built: Built, tmp_path: Path) -> None:
    seen = Recorder()
    manifest = repack_dataset(str(built.path), tmp_path / "set", BuildOptions(seq_len=8), Pool(None), seen)
    stages = [f"{verb} the {split} split" for split in manifest.splits for verb in ("packing", "writing")]
    assert list(seen.totals) == ["unpacking", *stages]
    assert seen.done == seen.totals
    assert seen.done["unpacking"] == sum(split.tokens for split in manifest.splits.values())
    assert set(seen.units.values()) == {"tokens"}
