"""`keepstep prove` with real runs, faults and other layouts, and its replay of a run that was tampered with."""

import json
import shutil
from pathlib import Path

import pytest

from launch.cli import main
from tests.chaos.harness import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
FAULTS = 6


@pytest.fixture(scope="module")
def proved(root: Path, undisturbed: Run) -> Path:
    """The output folder of a proof with the small recipe."""
    out = root / "proof"
    argv = ["prove", str(root / "recipe.json"), "parallel.precision=fp32", "--steps", "12", "--ranks", "2"]
    assert main([*argv, "--out", str(out), "--also", "ddp:1", "--also", "zero2:2", "--tolerance", "1e-4"]) == 0
    return out


def test_the_proof_passes_and_its_report_fits_on_a_page(proved: Path) -> None:
    report = json.loads((proved / "report.json").read_text())
    assert report["passed"] is True
    assert len(report["faults"]) == FAULTS
    assert [check["claim"] for check in report["checks"]] == [
        "every fault was injected",
        "losses and gradient norms equal those of the undisturbed run",
        "disturbed: the samples equal those of the undisturbed run",
        "weights and moments equal those of the undisturbed run",
        "ddp-1: the samples equal those of the undisturbed run",
        "ddp-1: the losses continue within the tolerance",
        "zero2-2: the samples equal those of the undisturbed run",
        "zero2-2: the losses continue within the tolerance",
    ]
    text = (proved / "report.txt").read_text()
    assert text.endswith("PASSED\n")
    assert len(text.splitlines()) < 60


def test_a_replayed_step_has_the_same_bits(proved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = proved / "runs" / "undisturbed"
    assert main(["prove", "--replay", str(run), "--step", "9", "--out", str(proved / "replay")]) == 0
    text = capsys.readouterr().out
    assert "steps 7 to 9 trained again from the checkpoint of step 6" in text
    assert "losses and gradient norms are the same, bit for bit" in text
    assert "weights and moments are the same, bit for bit" in text


def test_a_replay_finds_a_step_that_was_computed_wrongly_and_the_rank(
    proved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's metrics have another loss at step 8, and its checkpoint of step 9 is that of step 12."""
    run = proved / "runs" / "tampered"
    shutil.copytree(proved / "runs" / "undisturbed", run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in lines:
        if record["step"] == 8 and "loss" in record:
            record["loss"] += 1e-12
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.rmtree(run / "checkpoints" / "step-00000009")
    shutil.copytree(run / "checkpoints" / "step-00000012", run / "checkpoints" / "step-00000009")
    assert main(["prove", "--replay", str(run), "--step", "9", "--out", str(proved / "replay-tampered")]) == 1
    text = capsys.readouterr().out
    assert "differ from step 8 on" in text
    assert "the weights or moments that rank 0, 1 saved differ" in text
