"""The command `keepstep checkpoint` on the checkpoints of a small run."""

import json
from pathlib import Path

import pytest
import torch

from launch.cli import main
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.config import CheckpointConfig


@pytest.fixture
def run(tmp_path: Path) -> Path:
    manager = CheckpointManager(
        tmp_path / "run" / "checkpoints", CheckpointConfig(), {"vocab": 9}, lambda *_, **__: None
    )
    for step in (1, 2):
        state = {"model.w": torch.full((4, 2), float(step)), "model.b": torch.ones(3)}
        manager.save(SavedProgress(step, step * 1000, 3.5 / step), state, {})
    manager.close()
    return tmp_path / "run"


def flip_a_bit(run: Path, step: int) -> Path:
    shard = run / "checkpoints" / f"step-{step:08d}" / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[4097] ^= 1
    shard.write_bytes(data)
    return shard


def test_ls_lists_steps_tokens_and_losses(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["1", "1,000", "3.5000"], ["2", "2,000", "1.7500"]]


def test_show_prints_the_facts_of_the_newest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(run), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "step-00000002" in shown
    facts = dict(line.split(maxsplit=1) for line in shown.splitlines()[1:])
    assert facts["identity.vocab"] == "9"
    assert facts["tokens"] == "2,000"
    assert facts["model.w"].split() == ["F32", "[4,", "2]", "1"]


def test_verify_finds_a_flipped_bit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(run)]) == 0
    flip_a_bit(run, 1)
    assert main(["checkpoint", "verify", str(run)]) == 2
    captured = capsys.readouterr()
    assert "shard-00000.safetensors: model.w: bytes 4096 to 4128 do not match their checksum" in captured.out
    assert "1 of 2 checkpoints damaged" in captured.err


def test_diff_lists_the_differences(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (str(run / "checkpoints" / f"step-0000000{step}") for step in (1, 2))
    assert main(["checkpoint", "diff", first, second]) == 1
    shown = capsys.readouterr().out
    assert "step: 1 and 2" in shown
    assert "model.w: 8 of 8 elements differ, by 1 at most" in shown
    assert "model.b" not in shown
    assert main(["checkpoint", "diff", first, first]) == 0


@pytest.mark.parametrize("store", ["folder", "memory"])
def test_a_copy_is_equal_and_verified(run: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(run.parent / "copy") if store == "folder" else f"memory://{run.parent.name}/copy"
    assert main(["checkpoint", "copy", str(run), target]) == 0
    copied = capsys.readouterr().out.strip()
    assert copied == f"{target}/step-00000002"
    assert main(["checkpoint", "verify", copied]) == 0
    assert main(["checkpoint", "copy", str(run), target]) == 2
    assert "already exists" in capsys.readouterr().err
    back = str(run.parent / "back")
    assert main(["checkpoint", "copy", target, back]) == 0
    assert main(["checkpoint", "diff", back, str(run)]) == 0


def test_a_damaged_checkpoint_is_not_copied(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(run, 2)
    assert main(["checkpoint", "copy", str(run), str(run.parent / "copy")]) == 2
    assert "do not match their checksum" in capsys.readouterr().err
    assert list((run.parent / "copy").iterdir()) == []


def test_a_path_without_checkpoints_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(tmp_path)]) == 2
    assert "is not a checkpoint and has none" in capsys.readouterr().err


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict]:
    code = main(["checkpoint", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_every_action_prints_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (str(run / "checkpoints" / f"step-0000000{step}") for step in (1, 2))
    code, listed = as_json(capsys, "ls", str(run))
    assert code == 0
    assert [checkpoint["path"] for checkpoint in listed["checkpoints"]] == [first, second]
    assert listed["checkpoints"][1]["validation_loss"] == 1.75
    _, shown = as_json(capsys, "show", str(run), "--tensors")
    assert (shown["step"], shown["tensors"], shown["identity"]) == (2, 2, {"vocab": 9})
    assert shown["tensor_list"]["model.w"] == {"dtype": "F32", "shape": [4, 2], "pieces": 1}
    code, differing = as_json(capsys, "diff", first, second)
    assert (code, differing["equal"]) == (1, False)
    assert "step: 1 and 2" in differing["differences"]
    assert as_json(capsys, "diff", first, first)[1]["equal"]
    copied = f"{run.parent}/copy/step-00000002"
    assert as_json(capsys, "copy", str(run), str(run.parent / "copy"))[1] == {"path": copied, "source": second}
    flip_a_bit(run, 1)
    code, verified = as_json(capsys, "verify", str(run))
    assert (code, verified["checkpoints"][1]["faults"]) == (2, [])
    assert "model.w" in verified["checkpoints"][0]["faults"][0]
    (run / "checkpoints/step-00000001/manifest.json").write_text("{}")
    assert "damaged" in as_json(capsys, "ls", str(run))[1]["checkpoints"][0]
