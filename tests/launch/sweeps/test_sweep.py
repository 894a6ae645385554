"""`keepstep sweep` on real runs of a second, and what it refuses."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.cli import main
from launch.sweeps.grid import combinations
from launch.sweeps.runs import Ending, Outcome, cause_of, plan_run
from launch.sweeps.sweep_report import report_of
from train.exit_codes import STOPPED
from train.records.events import EventLog, read_events

GRID = "model.vocab_size=320,64"
"""A run that finishes and one that fails: the tokenizer has 300 tokens."""


@pytest.fixture(scope="module")
def swept(recipe: Path) -> Path:
    """The folder of the runs of GRID, trained by the command, whose output is in the file `swept` beside it."""
    runs = recipe.parent / "runs"
    with pytest.MonkeyPatch.context() as patch, (runs.parent / "swept").open("w+") as out:
        patch.setattr("sys.stdout", out)
        assert main(["sweep", str(recipe), GRID, "train.steps=6"]) == 1
    return runs


def test_a_run_that_fails_is_named_and_does_not_stop_the_others(swept: Path) -> None:
    lines = (swept.parent / "swept").read_text().splitlines()
    assert lines[0].split() == ["run", "model.vocab_size", "state", "step", "validation", "loss"]
    best, failed = lines[1].split(), lines[2].split()
    assert best[:4] == ["small-vocab_size-320", "320", "finished", "6"]
    assert failed == ["small-vocab_size-64", "64", "failed", "0"]
    assert 3 < float(best[4]) < 6
    text = "\n".join(lines)
    assert f"best: small-vocab_size-320 (validation loss {best[4]} nats per token), in {swept}/small-voc" in text
    assert "failed: small-vocab_size-64: model.vocab_size (64) must be at least the tokenizer's size" in text


def test_showing_the_runs_trains_and_changes_nothing(
    swept: Path, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.sweeps.runs._train", lambda run, ranks: pytest.fail(f"{run.recipe.name} was trained"))
    before = {path: path.stat().st_mtime_ns for path in swept.rglob("*")}
    assert main(["sweep", str(recipe), GRID, "train.steps=6", "--show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["metric"], shown["best"]) == ("validation_loss", "small-vocab_size-320")
    assert [run["state"] for run in shown["runs"]] == ["finished", "failed"]
    assert shown["runs"][0]["settings"] == {"model.vocab_size": "320"}
    assert {path: path.stat().st_mtime_ns for path in swept.rglob("*")} == before


def test_only_what_has_not_finished_is_trained(
    swept: Path, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    monkeypatch.setattr("launch.sweeps.runs._train", lambda run, ranks: trained.append(run.recipe.name) or 1)
    assert main(["sweep", str(recipe), GRID, "train.steps=6"]) == 1
    assert trained == ["small-vocab_size-64"]
    assert "[1/2] small-vocab_size-320: finished before" in capsys.readouterr().err
    trained.clear()
    assert main(["sweep", str(recipe), GRID, "train.steps=7"]) == 1
    assert len(trained) == 2, "a finished run of another length is not this one"


@pytest.mark.slow
def test_a_signal_lets_the_run_save_and_the_same_command_continues(recipe: Path, tmp_path: Path) -> None:
    words = [str(recipe), "train.seed=1,2", "train.steps=20", f"runs_dir={tmp_path}", "checkpoint.every=1"]
    command = [sys.executable, "-m", "launch.cli", "sweep", *words]
    run = tmp_path / "small-seed-1"
    with (tmp_path / "err").open("w+") as err:
        process = subprocess.Popen(command, stdout=err, stderr=err, cwd=Path(__file__).parents[3])
        deadline = time.monotonic() + 600
        while not (run / "checkpoints").is_dir() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=600) == STOPPED
        err.seek(0)
        text = err.read()
    assert text.splitlines()[-1] == "keepstep: run small-seed-1 was stopped (SIGTERM); the same command continues"
    kinds = [event["kind"] for event in read_events(run / "events.jsonl")]
    assert kinds[-1] == "stopped"
    assert not (tmp_path / "small-seed-2").exists()
    assert main(["sweep", *words]) == 0
    assert "resumed" in [event["kind"] for event in read_events(run / "events.jsonl")]


def outcome(name: str, recipe: Path, validation_loss: float | None, train_loss: float) -> Outcome:
    return Outcome(plan_run(str(recipe), [], name), Ending("finished", 6, train_loss, validation_loss))


def test_runs_are_ordered_by_validation_loss_if_all_have_one(recipe: Path) -> None:
    grid = combinations({"train.seed": ["1", "2", "3"]})
    runs = [outcome("a", recipe, 3.0, 1.0), outcome("b", recipe, 2.0, 2.0), outcome("c", recipe, math.nan, 0.5)]
    report = report_of(grid, runs)
    assert (report.metric, report.best) == ("validation_loss", "b")
    assert [row[1].run.recipe.name for row in report.rows] == ["b", "a", "c"]
    report = report_of(grid, [*runs[:2], outcome("c", recipe, None, 0.5)])
    assert (report.metric, report.best) == ("train_loss", "c")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lr=1e-3"], "no setting has several values; write them with commas, such as optim.lr=1e-3,2e-3"),
        (["optim.lr=1e-3,fast"], "optim.lr ('fast')"),
        (["optim.lr=1e-3,1e-3"], "optim.lr=1e-3,1e-3 gives the value 1e-3 twice"),
        (["name=a,b"], "name cannot be swept"),
        (
            ["optim.lr=1e-3,2e-3", "--", "--nodes", "2"],
            "--nodes and what follows is for `keepstep submit`; add --slurm",
        ),
    ],
)
def test_wrong_words_are_refused_before_anything_is_trained(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["sweep", str(recipe), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_the_same_runs_can_be_submitted_as_an_array_job(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["optim.lr=1e-3,2e-3", "train.seed=4", "--slurm", "--", "--ranks", "1", "--nodes", "1", "--dry-run"]
    assert main(["sweep", str(recipe), *words]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-1" in script
    assert "SWEEP=('lr-1e-3 optim.lr=1e-3' 'lr-2e-3 optim.lr=2e-3')" in script
    assert "OVERRIDES=(train.seed=4)" in script


def test_a_failure_without_words_is_no_error_of_the_sweep(tmp_path: Path) -> None:
    run = plan_run("recipes/laptop.yaml", [f"runs_dir={tmp_path}"], "x")
    run.folder.root.mkdir()
    EventLog(run.folder.events)("failed", error="")
    assert cause_of(run) == ""
