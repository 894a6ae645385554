import json
from itertools import islice
from pathlib import Path

import pytest

from data_pipeline.config import DataConfig
from data_pipeline.shards.dataset import DataSet
from data_pipeline.stream.stream import open_stream
from launch.cli import main


def test_a_data_set_is_built_that_training_can_read(folder: Path) -> None:
    config = DataConfig.model_validate({"sources": [{"path": str(folder / "set")}]})
    with open_stream(config, seq_len=32) as stream:
        steps = stream.steps(first_step=0, global_batch_size=4, micro_batch_size=2, rank=0, world_size=1)
        assert [batch.tokens_BT.shape for step in islice(steps, 2) for batch in step] == [(2, 32)] * 4


def build(folder: Path, out: Path, *arguments: str) -> int:
    fixed = ["--tokenizer", str(folder / "tokenizer"), "--workers", "1", "--out", str(out)]
    return main(["data", "build", str(folder / "in.jsonl"), *fixed, *arguments])


def test_the_build_prints_a_summary(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(folder, tmp_path / "set") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(tmp_path / "set")
    assert lines[-1].startswith("built in ")
    assert build(folder, tmp_path / "set", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fingerprint"] == DataSet(str(tmp_path / "set")).manifest.fingerprint
    assert shown["path"] == str(tmp_path / "set")
    assert shown["seconds"] > 0


def test_the_earlier_option_held_out_share_gives_the_same_with_one_warning(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(folder, tmp_path / "now", "--validation-share", "0.3") == 0
    assert capsys.readouterr().err == ""
    assert build(folder, tmp_path / "before", "--held-out-share", "0.3") == 0
    assert capsys.readouterr().err == "keepstep: --held-out-share is now --validation-share\n"
    now, before = (DataSet(str(tmp_path / name)).manifest for name in ("now", "before"))
    assert (now.plan, now.fingerprint) == (before.plan, before.fingerprint)
    assert now.splits["validation"].documents > 20


def test_the_help_does_not_show_held_out_share(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "build", "--help"])
    text = capsys.readouterr().out
    assert "--validation-share" in text
    assert "held" not in text


def test_a_share_is_tokenized_alone_and_the_plain_command_finishes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(folder, tmp_path / "set", "--share", "0/2") == 0
    assert capsys.readouterr().out == (
        f"part 0/2 is tokenized; the same command without --share finishes {tmp_path / 'set'}\n"
    )
    assert build(folder, tmp_path / "set", "--share", "1/2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["share"] == "1/2"
    assert not (tmp_path / "set").exists()
    assert build(folder, tmp_path / "set") == 0
    assert (tmp_path / "set").exists()
