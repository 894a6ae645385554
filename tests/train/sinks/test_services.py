"""Weights & Biases and MLflow: the real libraries, without a server."""

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.train.sinks.curves import wandb_rows
from train.sinks.resumable import SinkState

SETTINGS = {"optim.lr": 0.001, "data.sources.0.path": "https://me:***@host/data", **{f"x.{n}": n for n in range(120)}}


def needs(library: str) -> Any:
    """Skips a test where an extra is missing, but not in CI, which installs all of them."""
    missing = find_spec(library) is None and "CI" not in os.environ
    return pytest.mark.skipif(missing, reason=f"needs the extra {library}: pip install 'keepstep[{library}]'")


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def attempt(sink: Any, steps: range) -> None:
    for step in steps:
        sink.log(step, {"train/loss": 10.0 - step, "run/attempt": 1.0})
    sink.log(steps[-1], {"validation/loss": 3.0})


@needs("wandb")
def test_wandb_resumes_the_same_run_and_has_each_step_once(tmp_path: Path) -> None:
    from train.sinks.wandb_sink import WandbSink

    for steps in (range(1, 6), range(4, 9)):  # the second resumes from step 3
        sink = WandbSink(tmp_path, SinkState(tmp_path / "wandb.json"), "run", SETTINGS)
        assert sink.lacks_from == (0 if steps[0] == 1 else 5)
        attempt(sink, steps)
        sink.close()
        began = int(time.time())
        while int(time.time()) == began:  # wandb names the folder of an attempt after the second of its start
            time.sleep(0.05)
    run_id = SinkState(tmp_path / "wandb.json").id
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    rows = wandb_rows(files, last_step=8)
    losses = [(row["_step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(step, 10.0 - step) for step in range(1, 9)]
    assert [row["_step"] for row in rows if "validation/loss" in row] == [5, 8]


@needs("mlflow")
def test_mlflow_resumes_the_same_run_and_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.sinks.mlflow_sink import MlflowSink

    for steps in (range(1, 6), range(4, 9)):
        sink = MlflowSink(tmp_path, SinkState(tmp_path / "mlflow.json"), "run", SETTINGS)
        assert sink.lacks_from == (0 if steps[0] == 1 else 5)
        attempt(sink, steps)
        sink.close()
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "mlruns").as_uri())
    (experiment,) = [each for each in client.search_experiments() if each.name == "keepstep"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == SinkState(tmp_path / "mlflow.json").id
    assert run.info.status == "FINISHED"
    assert run.data.params == {key: str(value) for key, value in SETTINGS.items()}
    points = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert points == [(step, 10.0 - step) for step in range(1, 9)]


@needs("mlflow")
def test_a_run_that_the_server_has_lost_begins_again(tmp_path: Path) -> None:
    from train.sinks.mlflow_sink import MlflowSink

    state = SinkState(tmp_path / "mlflow.json")
    state.begin("0123456789abcdef0123456789abcdef")
    state.sent(7, ["train/loss"])
    sink = MlflowSink(tmp_path, state, "run", {"optim.lr": 0.001})
    assert sink.lacks_from == 0
    assert state.id != "0123456789abcdef0123456789abcdef"
