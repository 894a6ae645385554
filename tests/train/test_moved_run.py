"""A run folder that was moved or copied, used from another working directory: resumed, evaluated, exported."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from parallel.bootstrap import start
from parallel.environ import read_world
from tests.data_pipeline.conftest import tokenizer  # noqa: F401 - a fixture
from tests.data_pipeline.sets import build, documents
from train import loop
from train.config import Recipe
from train.config_file import load_recipe
from train.exit_codes import FINISHED
from train.health.stop import StopRequest
from train.records.jsonl import read_jsonl
from train.run_folder import RunFolder
from train.start import open_run

SETTINGS: dict[str, Any] = {
    "name": "run", "runs_dir": "runs",
    "model": {"vocab_size": 512, "seq_len": 32, "n_layers": 1, "n_heads": 2, "d_model": 16},
    "data": {"sources": [{"path": "sets/a"}, {"path": "sets/b", "weight": 2}]},
    "optim": {"lr": 1e-2, "warmup_steps": 2},
    "train": {"steps": 8, "global_batch_size": 4, "micro_batch_size": 2, "eval_every": 4, "eval_sequences": 7},
    "parallel": {"engine": "single", "device": "cpu", "precision": "fp32"},
    "checkpoint": {"every": 4, "background": False},
}  # fmt: skip


def train(recipe: Recipe) -> None:
    folder = RunFolder.of(recipe).root
    folder.mkdir(parents=True, exist_ok=True)
    with open_run(recipe, start(recipe.parallel, read_world({})), StopRequest(folder / "STOP")) as run:
        assert loop.train(run) == FINISHED


def losses(folder: Path, attempt: int) -> dict[int, float]:
    records = [record for record in read_jsonl(folder / "metrics.jsonl") if "loss" in record]
    return {record["step"]: record["loss"] for record in records if record["attempt"] == attempt}


@pytest.fixture
def home(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A folder with data sets and with a run that has trained all 8 steps, and has the checkpoint of step 4 only."""
    home = tmp_path / "home"
    for name, seed in (("a", 1), ("b", 2)):
        build(home / "sets" / name, documents(200, seed), tokenizer, validation_share=0.2)
    monkeypatch.chdir(home)
    train(Recipe.model_validate(SETTINGS))
    shutil.rmtree("runs/run/checkpoints/step-00000008")
    return home


@pytest.mark.parametrize("way", ["moved", "copied"])
def test_it_resumes_elsewhere_with_the_losses_of_the_run_left_in_place(
    way: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there" / "archive" / "renamed"
    shutil.copytree(home / "runs/run", there)
    train(load_recipe("runs/run/recipe.yaml"))
    first, in_place = losses(home / "runs/run", 1), losses(home / "runs/run", 2)
    *_, logged = (record for record in read_jsonl(home / "runs/run/metrics.jsonl") if "validation_loss" in record)
    if way == "moved":
        shutil.rmtree(home / "runs")
    shutil.move(home / "sets", tmp_path / "data sets")
    monkeypatch.chdir(tmp_path / "there")
    data = [f"data.sources.{number}.path={tmp_path / 'data sets' / name}" for number, name in enumerate("ab")]
    train(load_recipe(there / "recipe.yaml", ["name=renamed", "runs_dir=archive", *data]))
    assert losses(there, 2) == in_place == {step: first[step] for step in (5, 6, 7, 8)}

    arguments = [f"--data={tmp_path / 'data sets' / name}" for name in "ab"]
    assert_it_evaluates(there, arguments, logged["validation_loss"], capsys)
    shutil.rmtree(tmp_path / "data sets")
    assert main(["eval", str(there)]) == 2
    assert "name its new place: --data FOLDER" in capsys.readouterr().err
    assert main(["generate", str(there), "--prompt", "the cat", "--tokens", "3"]) == 0
    assert main(["export", str(there), "--out", "exported", "--check"]) == 0


def assert_it_evaluates(run: Path, data: list[str], logged: float, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(run / "checkpoints" / "step-00000008")
    capsys.readouterr()
    for path in (str(run), checkpoint):
        assert main(["eval", path, *data, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["loss"] == pytest.approx(logged, abs=1e-6)
        assert (found["checkpoint"], found["step"], found["logged_loss"]) == (checkpoint, 8, logged)
        assert set(found["sources"]) == {"a", "b"}
