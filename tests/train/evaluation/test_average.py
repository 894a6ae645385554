"""The average of the weights in whole runs: resumed, begun late, dropped, rolled back, evaluated and loaded."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.test_loop import STEPS, Job, data, spoil  # noqa: F401 - data is a fixture
from train.checkpoint.format.reader import Reader
from train.errors import CheckpointError
from train.evaluation.checkpoint import evaluate_checkpoint
from train.exit_codes import FINISHED, STOPPED
from train.export.trained_model import load_model
from train.records.jsonl import read_jsonl
from train.run import Run


def averaging(root: Path, data: Path, name: str = "run", ema_decay: float | None = 0.8, **guard: Any) -> Job:  # noqa: F811
    job = Job(root, data, name, **guard)
    set_decay(job, ema_decay)
    return job


def set_decay(job: Job, ema_decay: float | None) -> None:
    optim = job.recipe.optim.model_copy(update={"ema_decay": ema_decay})
    job.recipe = job.recipe.model_copy(update={"optim": optim})


def stop_after(job: Job, step: int) -> Any:
    def ask(run: Run, data_step: int) -> None:
        if data_step == step - 1:
            (job.folder / "STOP").touch()

    return ask


def weights(job: Job, step: int, suffix: str = "") -> dict[str, np.ndarray]:
    reader = Reader(job.folder / f"checkpoints/step-{step:08d}")
    names = [name.removeprefix("model.") for name in reader.names() if name.startswith("model.")]
    return {name: reader[f"optim.{name}{suffix}" if suffix else f"model.{name}"] for name in names}


def same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Job:  # noqa: F811
    job = averaging(tmp_path_factory.mktemp("whole"), data)
    with pytest.MonkeyPatch.context() as patch:
        assert job.train(patch) == FINISHED
    return job


def test_an_average_changes_no_weight_and_no_loss(
    whole: Job,
    tmp_path: Path,
    data: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = averaging(tmp_path, data, ema_decay=None)
    assert plain.train(monkeypatch) == FINISHED
    assert plain.losses() == whole.losses()
    assert same(weights(plain, STEPS), weights(whole, STEPS))
    assert not same(weights(whole, STEPS, ".average"), weights(whole, STEPS))


def test_a_resumed_run_has_the_average_of_the_uninterrupted_one(
    whole: Job,
    tmp_path: Path,
    data: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = averaging(tmp_path, data)
    assert job.train(monkeypatch, stop_after(job, 7)) == STOPPED
    assert job.train(monkeypatch) == FINISHED
    assert job.differs_from(whole) == []


def test_an_average_that_begins_late_starts_from_the_weights_and_one_that_ends_is_dropped(
    tmp_path: Path,
    data: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    job = averaging(tmp_path, data, ema_decay=None)
    assert job.train(monkeypatch, stop_after(job, 4)) == STOPPED
    set_decay(job, 0.999)
    assert job.train(monkeypatch, stop_after(job, 5)) == STOPPED
    assert "the checkpoint of step 4 has no average of weights: it starts from the weights" in caplog.text
    before, after = weights(job, 4), weights(job, 5)
    for name, average in weights(job, 5, ".average").items():
        share = 1 - (5 - 1) / (5 + 9)
        assert np.allclose(average, before[name] + share * (after[name] - before[name]), atol=1e-6)
    set_decay(job, None)
    assert job.train(monkeypatch) == FINISHED
    assert "the average of weights in the checkpoint of step 5 is dropped (optim.ema_decay)" in caplog.text
    assert not any(name.endswith(".average") for name in Reader(job.folder / f"checkpoints/step-{STEPS:08d}").names())


def test_a_skipped_batch_moves_no_average_and_a_roll_back_restores_it(
    tmp_path: Path,
    data: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skipping = averaging(tmp_path, data, "skip", on_spike="skip")
    rolling = averaging(tmp_path, data, "roll", on_spike="rollback")
    assert skipping.train(monkeypatch, spoil(6, 1000.0)) == FINISHED
    assert rolling.train(monkeypatch, spoil(6, 1000.0)) == FINISHED
    assert len(rolling.events("rolled_back")) == 1
    assert len(skipping.events("skipped")) == 1
    assert rolling.differs_from(skipping) == []
    for name, average in weights(skipping, STEPS, ".average").items():
        assert np.isfinite(average).all(), name


def test_the_logged_loss_of_the_average_is_that_of_the_checkpoints_average(whole: Job) -> None:
    found = [record for record in read_jsonl(whole.folder / "metrics.jsonl") if "validation_loss" in record]
    assert [record["step"] for record in found] == [5, 10, STEPS]
    live = evaluate_checkpoint(whole.folder, [], [], lambda _: None)
    average = evaluate_checkpoint(whole.folder, [], [], lambda _: None, average=True)
    assert found[-1]["validation_loss"] == pytest.approx(live.losses.mean, abs=1e-6)
    assert found[-1]["average_validation_loss"] == pytest.approx(average.losses.mean, abs=1e-6)
    assert live.losses.mean != pytest.approx(average.losses.mean, abs=1e-5)
    assert found[-1]["validation_bits_per_byte"] == pytest.approx(live.losses.bits_per_byte, abs=1e-6)
    assert (live.logged, average.logged) == (pytest.approx(live.losses.mean, abs=1e-6), None)


def test_a_checkpoint_without_an_average_is_refused_in_one_line() -> None:
    run = Path(__file__).parents[2] / "earlier_version" / "run"
    with pytest.raises(CheckpointError, match=r"--average: .* has no average of weights; train with optim\.ema_decay"):
        load_model(run, average=True)
