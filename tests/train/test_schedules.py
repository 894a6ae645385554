"""Runs whose batch size and row length follow a schedule: counted right, resumed bit for bit, refused in one line."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from launch.plan.estimate import Assumptions, plan_recipe
from launch.plan.machine import read_machines
from tests.train.test_loop import STEPS, Job, data, spoil  # noqa: F401 - data is a fixture
from train.config import Recipe
from train.config_file import load_recipe, recipe_from
from train.errors import CheckpointError, ConfigError
from train.exit_codes import FINISHED, STOPPED
from train.model.flops import flops_per_token
from train.run import Run

BATCHES = [{"step": 3, "global_batch_size": 8}, {"step": 7, "global_batch_size": 2}]
LENGTHS = [{"step": 0, "seq_len": 8}, {"step": 5, "seq_len": 16}, {"step": 8, "seq_len": 32}]
SIZES = [4, 4, 4, 8, 8, 8, 8, 2, 2, 2, 2, 2]
"""Sequences of each step under BATCHES."""


def scheduled(root: Path, data: Path, name: str = "run", batches: Any = BATCHES, lengths: Any = LENGTHS) -> Job:  # noqa: F811
    job = Job(root, data, name)
    set_schedules(job, batches, lengths)
    return job


def set_schedules(job: Job, batches: Any, lengths: Any, **train: Any) -> None:
    tree = job.recipe.model_dump(mode="json")
    tree["train"] |= {"batch_schedule": batches, "seq_len_schedule": lengths, **train}
    job.recipe = Recipe.model_validate(tree)


def stop_after(job: Job, step: int) -> Any:
    def ask(run: Run, data_step: int) -> None:
        if data_step == step - 1:
            (job.folder / "STOP").touch()

    return ask


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Job:  # noqa: F811
    job = scheduled(tmp_path_factory.mktemp("whole"), data)
    with pytest.MonkeyPatch.context() as patch:
        assert job.train(patch) == FINISHED
    return job


def test_each_step_counts_the_tokens_and_the_flops_of_its_batch(whole: Job) -> None:
    records = whole.records()
    assert [record["tokens"] for record in records] == [32 * sum(SIZES[: n + 1]) for n in range(STEPS)]
    for record, size, seq_len in zip(records, SIZES, [8] * 5 + [16] * 3 + [32] * 4, strict=True):
        model = whole.recipe.model.model_copy(update={"seq_len": seq_len})
        assert record["model_flops_per_second"] / record["tokens_per_second"] == pytest.approx(flops_per_token(model))
        seconds = sum(record["seconds"].get(kind, 0.0) for kind in ("data_wait", "compile", "step"))
        assert record["tokens_per_second"] * seconds == pytest.approx(32 * size)


@pytest.mark.parametrize("step", [3, 6, 8])
def test_a_run_that_is_stopped_in_a_schedule_resumes_bit_for_bit(
    whole: Job,
    tmp_path: Path,
    data: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    step: int,
) -> None:
    job = scheduled(tmp_path, data)
    assert job.train(monkeypatch, stop_after(job, step)) == STOPPED
    assert job.train(monkeypatch) == FINISHED
    assert job.losses() == whole.losses()
    assert job.differs_from(whole) == []


def test_a_skipped_batch_moves_no_change_to_another_sample(
    tmp_path: Path,
    data: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A change belongs to a step of the data, so the batches are those of the run that skipped none."""
    job = scheduled(tmp_path, data)
    set_schedules(job, BATCHES, LENGTHS, steps=10)
    assert job.train(monkeypatch, spoil(2, float("nan"))) == FINISHED
    [skipped] = job.events("skipped")
    assert (skipped["first_sample"], skipped["samples"]) == (8, 4)
    assert [record["tokens"] for record in job.records()][:3] == [32 * n for n in (4, 8, 16)]


def test_changes_of_later_steps_may_be_edited_and_used_ones_need_a_permission(
    tmp_path: Path,
    data: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = scheduled(tmp_path, data, lengths=[])
    assert job.train(monkeypatch, stop_after(job, 5)) == STOPPED
    later = [BATCHES[0], {"step": 9, "global_batch_size": 16}]
    for number, (batches, lengths, said) in enumerate(
        [
            ([{"step": 4, "global_batch_size": 2}], [], r"batch_size: 8 in the checkpoint, 2 in.*--allow batch_size"),
            (later, [{"step": 5, "seq_len": 16}], r"schedule.seq_lens: None in the checkpoint.*--allow schedule"),
        ]
    ):
        copy = scheduled(tmp_path / f"copy-{number}", data, batches=batches, lengths=lengths)
        shutil.copytree(job.folder, copy.folder)  # a rank that is refused leaves its process, and so its lease
        with pytest.raises(CheckpointError, match=said):
            copy.train(monkeypatch)
    set_schedules(job, later, [])
    assert job.train(monkeypatch) == FINISHED
    sizes = [4, 4, 4, 8, 8, 8, 8, 8, 8, 16, 16, 16]
    assert [record["tokens"] for record in job.records()] == [32 * sum(sizes[: n + 1]) for n in range(STEPS)]


def recipe(**train: Any) -> dict[str, Any]:
    tree = load_recipe("recipes/llama-1b.yaml").model_dump(mode="json")
    tree["train"] |= {"global_batch_size": 256, "micro_batch_size": 4, **train}
    return tree


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"batch_schedule": [{"step": 9, "global_batch_size": 8}] * 2}, "must be in order of step, each step once"),
        ({"batch_schedule": [{"global_batch_size": 8}]}, r"needs either step \(None\) or tokens \(None\)"),
        ({"seq_len_schedule": [{"step": 1, "tokens": 9, "seq_len": 64}]}, r"either step \(1\) or tokens \(9.0\)"),
        (
            {"batch_schedule": [{"step": 9, "global_batch_size": 30}]},
            r"batch_schedule.0.global_batch_size \(30\) must be a multiple of train.micro_batch_size \(4\)",
        ),
        (
            {"seq_len_schedule": [{"step": 0, "seq_len": 700}]},
            r"seq_len_schedule.0.seq_len \(700\) must divide model.seq_len \(\d+\).*next lower one that does is 512",
        ),
        ({"seq_len_schedule": [{"step": 0, "seq_len": 1}]}, r"must be a multiple of 16, as model.seq_len must"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_in_one_line(train: dict[str, Any], said: str) -> None:
    tree = recipe(**train)
    tree["parallel"] |= {"precision": "fp8"}
    with pytest.raises(ConfigError, match=said) as refused:
        recipe_from(tree, [])
    assert str(refused.value).count("\n") == 0


def test_a_scheduled_batch_size_must_fit_the_number_of_ranks() -> None:
    fits = recipe_from(recipe(batch_schedule=[{"step": 9, "global_batch_size": 8}]), [])
    with pytest.raises(ConfigError, match=r"train.batch_schedule.0.global_batch_size \(8\) must be a multiple of"):
        fits.grad_accum_steps(4)
    assert fits.grad_accum_steps(2) == 32


def test_a_change_may_be_placed_by_the_tokens_before_it() -> None:
    tree = recipe(
        batch_schedule=[{"step": 10, "global_batch_size": 512}, {"tokens": 0, "global_batch_size": 1024}],
        seq_len_schedule=[{"step": 0, "seq_len": 256}, {"tokens": 0, "seq_len": 512}],
    )
    seq_len = tree["model"]["seq_len"]
    tree["train"]["batch_schedule"][1]["tokens"] = (10 * 256 + 3 * 512 - 100) * seq_len
    tree["train"]["seq_len_schedule"][1]["tokens"] = 5 * 256 * seq_len
    resolved = recipe_from(tree, [])
    assert resolved.batch_changes == ((10, 512), (13, 1024))
    assert resolved.seq_lens == ((0, 256), (5, 512))
    assert recipe_from(resolved.model_dump(mode="json"), []) == resolved


def test_the_length_in_tokens_and_the_plan_follow_the_schedule() -> None:
    tree = recipe(batch_schedule=[{"step": 1000, "global_batch_size": 512}])
    seq_len = tree["model"]["seq_len"]
    tree["train"] |= {"tokens": 256 * seq_len * 3000}
    del tree["train"]["steps"]
    tree["optim"]["warmup_steps"] = 10
    resolved = recipe_from(tree, [])
    assert resolved.train.steps == 1000 + 1000
    machine = next(iter(read_machines().values()))
    assert plan_recipe(resolved, 8, machine, Assumptions()).tokens == 256 * seq_len * 3000
    averaging = recipe_from(resolved.model_dump(mode="json"), ["optim.ema_decay=0.999"])
    states = [
        plan_recipe(one, 1, machine, Assumptions()).memory.parts["optimizer state"] for one in (resolved, averaging)
    ]
    assert states[1] / states[0] == pytest.approx(12 / 8)
