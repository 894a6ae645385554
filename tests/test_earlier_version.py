"""A run, its checkpoint and its data set from before fields were renamed still work.

An earlier version made `tests/earlier_version`. There the manifest has `held_out_loss`, the data set has the split
`held_out`, the checkpoint has the pieces `rng.00000`, and metrics and events have their old names.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main
from train.checkpoint.format.manifest import Manifest
from train.checkpoint.format.reader import Reader
from train.checkpoint.format.verify import find_faults, read_manifest
from train.checkpoint.stores.local import LocalFolder
from train.config_file import load_recipe, recipe_as_yaml
from train.records.jsonl import read_jsonl

ROOT = Path(__file__).parents[1]
EARLIER = Path(__file__).parent / "earlier_version"
CHECKPOINT = EARLIER / "run" / "checkpoints" / "step-00000004"
LOSSES = {5: 5.931835543724798, 6: 5.9191653343939015}
"""Losses with which the earlier version resumed the same run, in nats per token."""
VALIDATION_LOSS = 5.918819304435484


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the run whose recipe names the copied run folder and the data set."""
    folder = tmp_path / "run"
    shutil.copytree(EARLIER / "run", folder)
    overrides = [f"runs_dir={tmp_path}", "name=run", f"data.sources.0.path={EARLIER / 'data'}", "parallel.device=cpu"]
    (folder / "recipe.yaml").write_text(recipe_as_yaml(load_recipe(folder / "recipe.yaml", overrides)))
    return folder


def manifest_of(checkpoint: Path) -> Manifest:
    return read_manifest(LocalFolder(checkpoint))[0]


def test_the_manifest_has_the_validation_loss_and_hides_random_states() -> None:
    manifest = manifest_of(CHECKPOINT)
    assert manifest.validation_loss == pytest.approx(5.922234565980973, abs=0)
    assert "rng.00000" in manifest.pieces
    assert not any("rng" in name for name in manifest.state_names)
    assert not any("rng" in name for name in Reader(CHECKPOINT).names())


def test_every_byte_of_the_checkpoint_matches_its_checksum(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_faults(LocalFolder(CHECKPOINT)) == []
    assert main(["checkpoint", "verify", str(CHECKPOINT)]) == 0


def test_ls_and_show_report_the_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(run)]) == 0
    listed = capsys.readouterr().out
    assert "512" in listed
    assert "5.9222" in listed
    assert main(["checkpoint", "show", str(run), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "validation" in shown
    assert "model.embed.weight" in shown
    assert "rng" not in shown


def test_a_copy_is_equal_and_keeps_every_piece(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "copy", str(CHECKPOINT), str(tmp_path)]) == 0
    copied = tmp_path / CHECKPOINT.name
    assert main(["checkpoint", "verify", str(copied)]) == 0
    assert main(["checkpoint", "diff", str(CHECKPOINT), str(copied)]) == 0
    assert manifest_of(copied).pieces.keys() == manifest_of(CHECKPOINT).pieces.keys()


def test_the_run_resumes_with_the_losses_of_the_earlier_version(run: Path) -> None:
    overrides = ["train.steps=6", "parallel.engine=single"]
    command = ["run", str(run / "recipe.yaml"), "--ranks", "1", *overrides, "--allow", "schedule"]
    resumed = subprocess.run(
        [sys.executable, "-m", "launch.cli", *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert resumed.returncode == 0, resumed.stdout[-5000:]
    [event] = [event for event in read_jsonl(run / "events.jsonl") if event["kind"] == "resumed"]
    assert event["step"] == 4
    losses = {record["step"]: record["loss"] for record in read_jsonl(run / "metrics.jsonl") if "loss" in record}
    assert {step: losses[step] for step in LOSSES} == pytest.approx(LOSSES, abs=1e-5)  # other processors, other bits

    before, after = manifest_of(CHECKPOINT), manifest_of(run / "checkpoints" / "step-00000006")
    assert after.validation_loss == pytest.approx(VALIDATION_LOSS, abs=1e-5)
    assert after.pieces.keys() == before.state_names, "random states are no longer stored"
    [old], [new] = before.rank_states, after.rank_states
    assert new["sources"][0]["fingerprint"] == old["sources"][0]["fingerprint"]
    assert (old["samples"], new["samples"]) == (16, 24)
    assert main(["checkpoint", "diff", str(CHECKPOINT), str(run / "checkpoints" / "step-00000006")]) == 1


def test_the_records_of_the_run_can_be_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run)]) == 0
    assert main(["report", str(run), "--text"]) == 0


def test_the_data_set_can_be_shown_with_its_validation_split(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", str(EARLIER / "data")]) == 0
    assert "validation" in capsys.readouterr().out
    fingerprint = json.loads((EARLIER / "data" / "manifest.json").read_text())["fingerprint"]
    assert manifest_of(CHECKPOINT).rank_states[0]["sources"][0]["fingerprint"] == fingerprint


def test_the_model_generates_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "--prompt", "def", "--tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("def")


def test_the_model_is_exported_with_equal_logits(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run / "checkpoints" / CHECKPOINT.name), "--out", str(tmp_path / "out"), "--check"]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
