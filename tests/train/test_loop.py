"""The loop in one process, with a real engine, stream and checkpoints. tests/chaos tests it on several ranks."""

import errno
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.build.prepare import BuildOptions, build_dataset
from data_pipeline.config import WeightChange
from data_pipeline.errors import DataError
from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from parallel.bootstrap import start
from parallel.environ import read_world
from train import exchange, loop
from train import run as run_module
from train import start as train_start
from train.checkpoint.format.compare import differences
from train.config import Recipe
from train.config_file import recipe_as_yaml
from train.errors import CheckpointError, DivergedError, ExhaustedError, StoppedError
from train.exit_codes import FINISHED, STOPPED
from train.health.injected_faults import corrupt_next_gradient
from train.health.stop import StopRequest
from train.health.watchdog import Watchdog
from train.records.clock import KINDS
from train.records.goodput import Account, account
from train.records.jsonl import read_jsonl
from train.run import Run
from train.start import open_run

STEPS = 12
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop")
    texts = [path.read_text() for path in sorted(ROOT.glob("train/*.py"))]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_sentencepiece(texts, folder / "tokenizer", vocab_size=512)
    options = BuildOptions(seq_len=32, validation_share=0.1)
    build_dataset([str(folder / "corpus.jsonl")], folder / "data", folder / "tokenizer", options)
    return folder / "data"


class Job:
    """A run folder. `train` does what `python -m train` does and calls `on_step(run, data_step)` before each step."""

    def __init__(self, root: Path, data: Path, name: str = "run", **guard: Any) -> None:
        self.folder = root / name
        self.allow: frozenset[str] = frozenset()
        self.recipe = Recipe.model_validate(
            {
                "name": name,
                "runs_dir": str(root),
                "model": {"vocab_size": 512, "seq_len": 32, "n_layers": 1, "n_heads": 2, "d_model": 16},
                "data": {"sources": [{"path": str(data)}]},
                "optim": {"lr": 1e-2, "warmup_steps": 2},
                "train": {
                    "steps": STEPS,
                    "global_batch_size": 4,
                    "micro_batch_size": 2,
                    "eval_every": 5,
                    "eval_sequences": 4,
                },
                "parallel": {"engine": "single", "device": "cpu", "precision": "fp32"},
                "checkpoint": {"every": 4, "background": False},
                "guard": {"window": 8, **guard},
            }
        )

    def train(
        self, monkeypatch: pytest.MonkeyPatch, on_step: Callable[[Run, int], None] = lambda run, step: None
    ) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        runtime = start(self.recipe.parallel, read_world({}))
        stop = StopRequest(self.folder / "STOP")
        with open_run(self.recipe, runtime, stop, self.allow) as run, monkeypatch.context() as patch:
            seed_rank = loop.seed_rank

            def before_step(seed: int, runtime: Any, data_step: int) -> None:
                on_step(run, data_step)
                seed_rank(seed, runtime, data_step)

            patch.setattr(loop, "seed_rank", before_step)
            try:
                return loop.train(run)
            except (DivergedError, DataError, OSError):  # a real rank leaves its process
                run.stream.close()
                run.metrics.close()
                raise

    def records(self) -> list[dict[str, Any]]:
        return [record for record in read_jsonl(self.folder / "metrics.jsonl") if "loss" in record]

    def losses(self) -> dict[int, tuple[float, float, int]]:
        """Return loss, gradient norm and data step by step; of a step that was computed twice, the last."""
        return {r["step"]: (r["loss"], r["grad_norm"], r["data_step"]) for r in self.records()}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_jsonl(self.folder / "events.jsonl") if event["kind"] == kind]

    def account(self) -> Account:
        return account(read_jsonl(self.folder / "events.jsonl"))

    def process_seconds(self) -> float:
        """Seconds from the start of this process to the last event."""
        return list(read_jsonl(self.folder / "events.jsonl"))[-1]["uptime"]

    def stop_as_it_starts(self, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
        """Request a stop while a function of `train.start` runs."""
        true = getattr(train_start, stage)

        def ask(*arguments: Any) -> Any:
            (self.folder / "STOP").touch()
            return true(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(train_start, stage, ask)
            with pytest.raises(StoppedError, match=r"stopped before the first step of this start \(STOP file\)"):
                self.train(patch)
        assert not (self.folder / "STOP").exists()
        assert not (self.folder / "lease.json").exists()

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    def differs_from(self, other: "Job") -> list[str]:
        name = f"checkpoints/step-{STEPS:08d}"
        return [line for line in differences(self.folder / name, other.folder / name) if line.startswith(("m", "o"))]


def spoil(bad_step: int, factor: float, times: int = 1) -> Callable[[Run, int], None]:
    """Multiply the gradients of some data steps, each time they are computed."""

    def on_step(run: Run, data_step: int) -> None:
        if not bad_step <= data_step < bad_step + times:
            return
        engine: Any = run.engine
        if math.isnan(factor):
            corrupt_next_gradient(engine)
            return
        true = type(engine).forward_backward

        def forward_backward(micro_batches: Any, loss_fn: Any, scale: float) -> Any:
            del engine.forward_backward
            return true(engine, micro_batches, loss_fn, scale * factor)

        engine.forward_backward = forward_backward

    return on_step


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Job:
    job = Job(tmp_path_factory.mktemp("uninterrupted"), data)
    with pytest.MonkeyPatch.context() as patch:
        assert job.train(patch) == FINISHED
    return job


def test_a_run_leaves_its_folder_ready_for_the_next_one(uninterrupted: Job) -> None:
    assert sorted(uninterrupted.losses()) == list(range(1, STEPS + 1))
    assert uninterrupted.checkpoints() == ["step-00000004", "step-00000008", "step-00000012"]
    assert [event["step"] for event in uninterrupted.events("finished")] == [STEPS]
    assert not (uninterrupted.folder / "lease.json").exists()


def test_every_second_is_counted_once_in_the_events(uninterrupted: Job) -> None:
    assert {kind for record in uninterrupted.records() for kind in record["seconds"]} <= set(KINDS.values())
    assert [event["step"] for event in uninterrupted.events("booked")] == [1, 4, 8, 12]
    spent = uninterrupted.account()
    assert spent.total == pytest.approx(uninterrupted.process_seconds(), abs=0.01)
    assert (spent.kept_steps, spent.lost_steps) == (STEPS, 0)
    for kind in ("start", "step", "data_wait", "evaluation", "checkpoint_stall"):
        assert spent.seconds[kind] > 0.0, kind
    booked = [event["seconds"] for kind in ("booked", "finished") for event in uninterrupted.events(kind)]
    rest = uninterrupted.process_seconds() - sum(sum(seconds.values()) for seconds in booked)
    assert spent.seconds["lost_work"] == pytest.approx(rest, abs=0.01), "only while the last event is written"


@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_a_run_that_is_stopped_at_any_step_saves_and_resumes_bit_for_bit(
    tmp_path: Path, data: Path, uninterrupted: Job, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    job = Job(tmp_path, data)

    def ask(run: Run, data_step: int) -> None:
        if data_step == step - 1:
            (job.folder / "STOP").touch()

    assert job.train(monkeypatch, ask) == STOPPED
    [stopped] = job.events("stopped")
    assert (stopped["step"], stopped["reason"]) == (step, "STOP file")
    assert job.checkpoints()[-1] == f"step-{step:08d}"
    assert not (job.folder / "STOP").exists(), "the next start would stop again"
    assert job.train(monkeypatch) == FINISHED
    assert job.losses() == uninterrupted.losses()
    assert job.differs_from(uninterrupted) == []


STAGES = ["events_backwards", "announce", "build_empty_engine", "resume"]
"""Functions of `train.start` that are called before the first step."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_new_run_that_is_stopped_as_it_starts_leaves_no_checkpoint_and_can_start(
    tmp_path: Path, data: Path, uninterrupted: Job, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    job = Job(tmp_path, data)
    job.stop_as_it_starts(monkeypatch, stage)
    [stopped] = job.events("stopped")
    assert (stopped["phase"], stopped["reason"]) == ("start", "STOP file")
    assert not list(job.folder.glob("checkpoints/*"))
    assert job.train(monkeypatch) == FINISHED
    assert job.losses() == uninterrupted.losses()
    assert [event["attempt"] for event in job.events("started")] == [1, 2]


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_that_is_stopped_as_it_starts_keeps_its_checkpoints(
    tmp_path: Path, data: Path, uninterrupted: Job, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    job = Job(tmp_path, data)
    shutil.copytree(uninterrupted.folder, job.folder)
    shutil.rmtree(job.folder / f"checkpoints/step-{STEPS:08d}")
    job.stop_as_it_starts(monkeypatch, stage)
    assert job.checkpoints() == ["step-00000004", "step-00000008"]
    assert job.train(monkeypatch) == FINISHED
    assert job.differs_from(uninterrupted) == []
    spent = job.account()
    assert spent.seconds["lost_work"] > 0.0, "steps 9 to 12 were trained again"
    assert (spent.kept_steps, spent.lost_steps) == (STEPS, 4)


def test_only_a_run_without_a_checkpoint_draws_initial_values(
    tmp_path: Path, data: Path, uninterrupted: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, data)
    shutil.copytree(uninterrupted.folder, job.folder)
    shutil.rmtree(job.folder / f"checkpoints/step-{STEPS:08d}")
    with monkeypatch.context() as patch:
        patch.setattr(train_start, "initial_value", lambda *_, **__: 1 // 0)
        assert job.train(patch) == FINISHED
        assert job.differs_from(uninterrupted) == []
        with pytest.raises(ZeroDivisionError):
            Job(tmp_path, data, "new").train(patch)


def test_the_watchdog_hears_of_each_block_of_initial_values(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(Watchdog, "report_activity", lambda self: heard.append(self._phase))
    Job(tmp_path, data).train(monkeypatch)
    tensors_of_one_layer = 9
    assert heard.count("start") > tensors_of_one_layer


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(
    tmp_path: Path, data: Path, uninterrupted: Job, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    job = Job(tmp_path, data)
    assert job.train(monkeypatch, spoil(5, factor)) == FINISHED
    [skipped] = job.events("skipped")
    assert (skipped["step"], skipped["data_step"], skipped["first_sample"], skipped["samples"]) == (5, 5, 20, 4)
    losses = job.losses()
    assert {s: losses[s] for s in range(1, 6)} == {s: uninterrupted.losses()[s] for s in range(1, 6)}
    assert losses[6][2] == 7, "step 6 trained on the batch after the bad one"
    assert all(math.isfinite(loss) for loss, _, _ in losses.values())


def test_a_spike_that_is_only_reported_is_trained_on(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, data, on_spike="report")
    assert job.train(monkeypatch, spoil(6, 1000.0)) == FINISHED
    [spike] = job.events("spike")
    assert spike["data_step"] == 6
    assert spike["why"].startswith("gradient norm ")
    assert job.losses()[STEPS][2] == STEPS


def test_a_roll_back_ends_with_the_weights_of_a_run_that_skipped(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bad batch changed no weights in either run; the steps since the checkpoint are the same."""
    skipping, rolling = Job(tmp_path, data, "skip", on_spike="skip"), Job(tmp_path, data, "roll", on_spike="rollback")
    assert skipping.train(monkeypatch, spoil(6, 1000.0)) == FINISHED
    assert rolling.train(monkeypatch, spoil(6, 1000.0)) == FINISHED
    [rolled] = rolling.events("rolled_back")
    assert (rolled["step"], rolled["data_step"]) == (6, 6)
    assert [event["step"] for event in rolling.events("resumed")] == [4]
    assert [record["step"] for record in rolling.records()] == [*range(1, 7), *range(5, STEPS + 1)]
    assert rolling.losses() == skipping.losses()
    assert rolling.differs_from(skipping) == []
    spent = rolling.account()
    assert spent.seconds["lost_work"] > 0.0
    assert (spent.kept_steps, spent.lost_steps) == (STEPS, 2)


def test_a_roll_back_before_the_first_checkpoint_skips(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, data, on_spike="rollback")
    job.recipe = job.recipe.model_copy(update={"checkpoint": job.recipe.checkpoint.model_copy(update={"every": STEPS})})
    assert job.train(monkeypatch, spoil(5, 1000.0)) == FINISHED
    assert [event["data_step"] for event in job.events("rolled_back")] == [5]
    [skipped] = job.events("skipped")
    assert (skipped["data_step"], skipped["why"]) == (5, "there is no checkpoint to roll back to")


def test_a_resumed_run_remembers_what_was_skipped_and_the_guards_window(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = Job(tmp_path, data, "whole", on_spike="skip"), Job(tmp_path, data, "parts", on_spike="skip")
    spoiled = spoil(6, 1000.0)

    def stop_before_the_spike(run: Run, data_step: int) -> None:
        spoiled(run, data_step)
        if data_step == 5:
            (parts.folder / "STOP").touch()

    assert whole.train(monkeypatch, spoiled) == FINISHED
    assert parts.train(monkeypatch, stop_before_the_spike) == STOPPED
    assert parts.train(monkeypatch, spoiled) == FINISHED
    assert [event["data_step"] for event in parts.events("skipped")] == [6]
    assert parts.losses() == whole.losses()


def test_too_many_bad_steps_in_a_row_end_the_run_for_good(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, data, max_consecutive_bad_steps=3)
    with pytest.raises(DivergedError, match=r"bad step number 4 at data step 8 .*max_consecutive_bad_steps \(3\)"):
        job.train(monkeypatch, spoil(5, math.nan, times=99))
    [failed] = job.events("failed")
    assert failed["exit_code"] == 2
    assert "the run has diverged" in failed["error"]


def test_a_batch_without_targets_is_skipped_with_its_samples(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, data)
    calls = iter(range(1000))
    true = exchange.count_targets_by_source
    monkeypatch.setattr(
        exchange, "count_targets_by_source", lambda batches, n: true(batches, n) * (0.0 if next(calls) == 3 else 1.0)
    )
    assert job.train(monkeypatch) == FINISHED
    [skipped] = job.events("skipped")
    assert (skipped["data_step"], skipped["why"]) == (3, "no targets in the batch")
    assert job.losses()[STEPS][2] == STEPS + 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
def test_a_compiled_run_compiles_in_its_first_step_only_and_its_checkpoint_does_not_show_it(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses LayerNorm: RMSNorm has another backward pass when it is not compiled (`train.model.norm`). The compiled loss
    has other last bits."""
    plain, job = Job(tmp_path, data, "plain"), Job(tmp_path, data)
    for one in (plain, job):
        model = one.recipe.model.model_copy(update={"norm": "layernorm"})
        parallel = one.recipe.parallel.model_copy(update={"compile": one is job})
        one.recipe = one.recipe.model_copy(update={"model": model, "parallel": parallel})
    assert plain.train(monkeypatch) == FINISHED
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # quick
    assert job.train(monkeypatch) == FINISHED
    first, second = ({"compile", "step"} & record["seconds"].keys() for record in job.records()[:2])
    assert (first, second) == ({"compile", "step"}, {"step"})
    assert job.events("compiled_again") == []
    assert job.losses().keys() == plain.losses().keys()
    for step, values in plain.losses().items():
        assert job.losses()[step] == pytest.approx(values, rel=1e-5)
    assert not [line for line in job.differs_from(plain) if "only in" in line]


def test_one_process_begins_without_torchs_compiler_and_without_dtensor(data: Path, tmp_path: Path) -> None:
    """Each takes half a second to import. Runs the real entry point, whose first save comes after step 4."""
    (tmp_path / "recipe.yaml").write_text(recipe_as_yaml(Job(tmp_path, data).recipe))
    program = (
        "import sys, train.__main__\n"
        "from train.checkpoint.manager import CheckpointManager as Manager\n"
        "save = Manager.save\n"
        "def show(self, progress, *rest, **options):\n"
        "    slow = {'torch._dynamo', 'torch.distributed.tensor', 'sympy'} & set(sys.modules)\n"
        "    print('before', progress.step, sorted(slow))\n"
        "    save(self, progress, *rest, **options)\n"
        "Manager.save = show\n"
        "train.__main__.main(sys.argv[1:])\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "recipe.yaml")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "before 4 []"


def test_dead_gradients_end_the_run_and_name_the_way_back(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, data)
    with pytest.raises(DivergedError, match=r"the model is dead.*data step 11.* Step 8 is the last checkpoint before"):
        job.train(monkeypatch, spoil(9, 0.0, times=99))
    assert [event["data_step"] for event in job.events("spike")] == [9, 10]
    [failed] = job.events("failed")
    assert failed["exit_code"] == 2
    assert "`keepstep checkpoint copy" in failed["error"]


def with_settings(job: Job, section: str, **values: Any) -> Job:
    part = getattr(job.recipe, section).model_copy(update=values)
    job.recipe = job.recipe.model_copy(update={section: part})
    return job


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("optim", {"weight_decay": 0.2}, r"optimizer\.weight_decay: 0\.1 in .* 0\.2 in this run.*: --allow optimizer$"),
        ("optim", {"betas": (0.8, 0.9)}, r"optimizer\.betas: \[0\.9, 0\.95\].*--allow optimizer$"),
        ("optim", {"eps": 1e-6, "lr": 0.1}, r"--allow optimizer --allow schedule$"),
        ("train", {"seed": 2}, r"seed: 1 in the checkpoint, 2 in this run.*--allow seed$"),
        ("model", {"dropout": 0.5}, r"dropout: 0\.0 in the checkpoint, 0\.5 in this run.*--allow dropout$"),
        ("model", {"rope_theta": 9.0}, r"model\.rope_theta: .*Use the checkpoint's recipe, or another run name$"),
        (
            "data",
            {"weight_changes": (WeightChange(step=3, weights=(2.0,)),)},
            r"data_weights: \[1\.0\] in the checkpoint, \[2\.0\] in this run.*--allow data_weights$",
        ),
        ("train", {"global_batch_size": 2}, r"batch_size: 4 in the checkpoint, 2 in this run.*--allow batch_size$"),
    ],
)
def test_a_resume_that_would_change_the_training_is_refused_and_keeps_the_recipe_file(
    tmp_path: Path,
    data: Path,
    uninterrupted: Job,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    values: dict[str, Any],
    message: str,
) -> None:
    job = Job(tmp_path, data)
    shutil.copytree(uninterrupted.folder, job.folder)
    before = (job.folder / "recipe.yaml").read_bytes()
    with pytest.raises((CheckpointError, DataError), match=message):
        with_settings(job, section, **values).train(monkeypatch)
    assert (job.folder / "recipe.yaml").read_bytes() == before


def test_a_resume_says_which_settings_changed_and_a_finished_run_that_it_is_finished(
    tmp_path: Path, data: Path, uninterrupted: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, data)
    shutil.copytree(uninterrupted.folder, job.folder)
    with caplog.at_level("INFO"):
        assert with_settings(job, "optim", max_grad_norm=0.5).train(monkeypatch) == FINISHED
    [changed] = job.events("changed_setting")
    assert (changed["name"], changed["checkpoint"], changed["run"]) == ("optim.max_grad_norm", 1.0, 0.5)
    assert "optim.max_grad_norm is 1.0 in the checkpoint of step 12 and 0.5 in this run" in caplog.text
    assert "the run is finished: its newest checkpoint is step 12, and train.steps is 12" in caplog.text
    assert job.losses() == uninterrupted.losses()


def test_a_planned_change_of_weights_needs_no_permission(
    tmp_path: Path, data: Path, uninterrupted: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, data)
    shutil.copytree(uninterrupted.folder, job.folder)
    shutil.rmtree(job.folder / f"checkpoints/step-{STEPS:08d}")
    planned = (WeightChange(step=8, weights=(2.0,)), WeightChange(step=10, weights=(3.0,)))
    with_settings(job, "data", weight_changes=planned)
    assert job.train(monkeypatch) == FINISHED
    assert job.train(monkeypatch) == FINISHED, "the changes are in the past now, and the checkpoint knows them"


def test_a_restart_on_a_full_disk_fails_in_one_line_and_says_so_in_the_events(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(job.folder / "x"))

    for place, name in ((train_start.Lease, "_write"), (train_start, "Metrics"), (run_module, "write_atomic")):
        job = Job(tmp_path, data, f"run-{name.strip('_')}")
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            with pytest.raises(ExhaustedError, match=r"no space is left for .*/x .*free some space"):
                job.train(patch)
        last = list(read_jsonl(job.folder / "events.jsonl"))[-1]
        assert (last["kind"], last["exit_code"]) == ("failed", 1)


def test_a_run_ends_when_its_time_is_used_up_and_says_so_when_it_is_started_again(
    tmp_path: Path, data: Path, uninterrupted: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = with_settings(Job(tmp_path, data), "train", max_seconds=1e6)

    def time_passes(run: Run, data_step: int) -> None:
        if data_step == 4:
            object.__setattr__(run, "ends_at_uptime", 0.0)

    assert job.train(monkeypatch, time_passes) == FINISHED
    [finished] = job.events("finished")
    assert (finished["step"], finished["reason"]) == (5, "train.max_seconds (1e+06)")
    assert job.checkpoints()[-1] == "step-00000005"
    assert with_settings(job, "train", max_seconds=1e-3).train(monkeypatch) == FINISHED
    assert [event["step"] for event in job.events("finished")] == [5, 5]
    assert with_settings(job, "train", max_seconds=None).train(monkeypatch) == FINISHED
    assert job.losses() == uninterrupted.losses()


def test_an_allowed_batch_size_holds_from_the_checkpoint_on(
    tmp_path: Path, data: Path, uninterrupted: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, data)
    shutil.copytree(uninterrupted.folder, job.folder)
    shutil.rmtree(job.folder / f"checkpoints/step-{STEPS:08d}")
    job.allow = frozenset({"batch_size"})
    with_settings(job, "train", global_batch_size=2)
    assert job.train(monkeypatch, spoil(9, math.nan)) == FINISHED
    [allowed] = job.events("allowed_difference")
    assert (allowed["name"], allowed["checkpoint"], allowed["run"]) == ("batch_size", 4, 2)
    [skipped] = job.events("skipped")
    assert (skipped["first_sample"], skipped["samples"]) == (8 * 4 + 2, 2)
    assert [record["tokens"] for record in job.records()][-1] == (8 * 4 + 4 * 2) * 32
    job.allow = frozenset()
    assert job.train(monkeypatch) == FINISHED, "the checkpoint knows the new size"


def test_a_source_may_be_added_with_a_permission(
    tmp_path: Path, data: Path, uninterrupted: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, job = Job(tmp_path, data, "refused"), Job(tmp_path, data, "allowed")
    shutil.copytree(data, tmp_path / "more")
    for one in (refused, job):
        shutil.copytree(uninterrupted.folder, one.folder)
        shutil.rmtree(one.folder / f"checkpoints/step-{STEPS:08d}")
        [first] = one.recipe.data.sources
        with_settings(one, "data", sources=(first, first.model_copy(update={"path": str(tmp_path / "more")})))
    message = r"data_weights: \[1\.0\] in the checkpoint, \[1\.0, 1\.0\] in this run.*--allow data_weights$"
    with pytest.raises(CheckpointError, match=message):
        refused.train(monkeypatch)
    job.allow = frozenset({"data_weights"})
    assert job.train(monkeypatch) == FINISHED
    assert any("loss/more" in record for record in job.records() if record["step"] > 8)
