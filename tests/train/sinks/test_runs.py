"""A real run with all sinks, which is killed and resumed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.sinks.curves import tensorboard_curve, wandb_rows
from tests.train.sinks.test_services import needs
from train.config import SinkName
from train.exit_codes import FAILED_FOR_GOOD
from train.health.injected_faults import VARIABLE
from train.records.jsonl import read_jsonl
from train.sinks import open_sinks
from train.sinks.open_sinks import check_sinks

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "tests" / "earlier_version" / "run" / "recipe.yaml"
DATA = ROOT / "tests" / "earlier_version" / "data"
STEPS = 10
SINKS: tuple[SinkName, ...] = ("tensorboard", "wandb", "mlflow", "prometheus")


def train(folder: Path, *overrides: str, faults: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs one rank on a recipe of one layer, without an account of any service."""
    settings = [
        *(f"runs_dir={folder}", f"data.sources.0.path={DATA}", "parallel.device=cpu", f"train.steps={STEPS}"),
        *("checkpoint.every=3", "checkpoint.background=false", *overrides),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))}
    env |= {"HOME": str(folder), VARIABLE: json.dumps(faults or {})}
    command = [sys.executable, "-m", "train", str(RECIPE), *settings]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed after 7 steps, resumed from step 6, and finished."""
    folder = tmp_path_factory.mktemp("sinks")
    kill = {"fault": "kill", "rank": 0, "step": 7, "phase": "forward"}
    sinks = f"train.sinks=[{','.join(SINKS)}]"
    killed = train(folder, sinks, faults={"marks": str(folder), "faults": [kill]})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = train(folder, sinks)
    assert finished.returncode == 0, finished.stderr
    assert "has a problem" not in killed.stderr + finished.stderr
    return folder / "run"


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_jsonl(run / "metrics.jsonl") if "loss" in record}


@needs("wandb")
@needs("mlflow")
def test_after_a_kill_tensorboard_has_each_step_once(run: Path) -> None:
    assert len(list(read_jsonl(run / "metrics.jsonl", [b'"loss"']))) > STEPS, "steps were computed again"
    curve = tensorboard_curve(run / "tensorboard", "train/loss")
    assert [step for step, _ in curve] == list(range(1, STEPS + 1))
    assert dict(curve) == pytest.approx(losses(run), rel=1e-6)
    assert [step for step, _ in tensorboard_curve(run / "tensorboard", "validation/loss")] == [2, 4, 6, 8, 10]


@needs("wandb")
@needs("mlflow")
def test_after_a_kill_wandb_has_one_run_with_each_step_once(run: Path) -> None:
    files = sorted((run / "sinks").glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1
    points = [(row["_step"], row["train/loss"]) for row in wandb_rows(files, last_step=STEPS) if "train/loss" in row]
    assert points == sorted(losses(run).items())


@needs("wandb")
@needs("mlflow")
def test_after_a_kill_mlflow_has_one_run_with_each_step_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((run / "sinks" / "mlruns").as_uri())
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    points = client.get_metric_history(runs[0].info.run_id, "train/loss")
    assert len(runs) == 1
    assert [(point.step, point.value) for point in points] == sorted(losses(run).items())
    assert runs[0].data.params["train.steps"] == str(STEPS)


@needs("wandb")
@needs("mlflow")
def test_a_run_that_ended_leaves_no_current_values(run: Path) -> None:
    assert not list(run.rglob("*.prom"))


def test_a_sink_whose_library_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.config_file import load_recipe
    from train.errors import ConfigError

    monkeypatch.setitem(open_sinks.LIBRARIES, "wandb", ("no_such_library",))
    recipe = load_recipe(RECIPE, ["train.sinks=[tensorboard,wandb]", f"runs_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"^train\.sinks \(tensorboard, wandb\) needs wandb, .*pip install") as raised:
        check_sinks(recipe)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == FAILED_FOR_GOOD


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.sinks=[wandb,wandb]", "train.sinks (wandb, wandb) must name each sink once; remove one wandb"),
        ("train.sinks=[comet]", "'tensorboard', 'wandb', 'mlflow' or 'prometheus'"),
        ("train.prometheus_dir=/tmp", "train.prometheus_dir (/tmp) needs prometheus in train.sinks (tensorboard)"),
    ],
)
def test_settings_of_sinks_that_do_not_fit_are_one_line(setting: str, message: str) -> None:
    from train.config_file import load_recipe
    from train.errors import ConfigError

    with pytest.raises(ConfigError) as raised:
        load_recipe(RECIPE, [setting])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
