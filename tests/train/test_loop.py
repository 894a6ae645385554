"""The loop in one process, with a real engine, stream and checkpoints. Several ranks are tested in tests/chaos."""

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
from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from parallel.bootstrap import start
from parallel.environ import read_world
from train import loop
from train import start as train_start
from train.checkpoint.format.compare import differences
from train.config import Recipe
from train.config_file import recipe_as_yaml
from train.errors import DivergedError, StoppedError
from train.exit_codes import FINISHED, STOPPED
from train.health.injected_faults import spoil_next_gradient
from train.health.stop import StopRequest
from train.records.clock import KINDS
from train.records.events import read_jsonl
from train.records.goodput import ORDER, Account, account
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
    """A run folder; `train` does what `python -m train` does. `on_step(run, data_step)` is called before each step."""

    def __init__(self, root: Path, data: Path, name: str = "run", **guard: Any) -> None:
        self.folder = root / name
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
        with open_run(self.recipe, runtime, StopRequest(self.folder / "STOP")) as run, monkeypatch.context() as patch:
            seed_rank = loop.seed_rank

            def before_step(seed: int, runtime: Any, data_step: int) -> None:
                on_step(run, data_step)
                seed_rank(seed, runtime, data_step)

            patch.setattr(loop, "seed_rank", before_step)
            try:
                return loop.train(run)
            except DivergedError:  # a real rank leaves its process
                run.stream.close()
                run.metrics.close()
                raise

    def records(self) -> list[dict[str, Any]]:
        return [record for record in read_jsonl(self.folder / "metrics.jsonl") if "loss" in record]

    def losses(self) -> dict[int, tuple[float, float, int]]:
        """Of a step that was done again, the last."""
        return {r["step"]: (r["loss"], r["grad_norm"], r["data_step"]) for r in self.records()}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_jsonl(self.folder / "events.jsonl") if event["kind"] == kind]

    def booked(self) -> dict[str, float]:
        """The sum of what the events say, by kind."""
        seconds = dict.fromkeys(ORDER, 0.0)
        for kind in ("booked", "settled", "finished", "stopped"):
            for event in self.events(kind):
                for spent_on, amount in event["seconds"].items():
                    seconds[spent_on] += amount
        return seconds

    def account(self) -> Account:
        return account(read_jsonl(self.folder / "events.jsonl"), read_jsonl(self.folder / "metrics.jsonl"))

    def stop_as_it_starts(self, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
        """Ask for it while a function of `train.start` runs."""
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
    """Multiply the gradients of data steps, each time they are trained on."""

    def on_step(run: Run, data_step: int) -> None:
        if not bad_step <= data_step < bad_step + times:
            return
        engine: Any = run.engine
        if math.isnan(factor):
            spoil_next_gradient(engine)
            return
        true = type(engine).forward_backward

        def forward_backward(micro_batches: Any, loss_fn: Any, scale: float) -> Any:
            del engine.forward_backward
            return true(engine, micro_batches, loss_fn, scale * factor)

        engine.forward_backward = forward_backward

    return on_step


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Job:
    job = Job(tmp_path_factory.mktemp("undisturbed"), data)
    with pytest.MonkeyPatch.context() as patch:
        assert job.train(patch) == FINISHED
    return job


def test_a_run_leaves_its_folder_ready_for_the_next_one(undisturbed: Job) -> None:
    assert sorted(undisturbed.losses()) == list(range(1, STEPS + 1))
    assert undisturbed.checkpoints() == ["step-00000004", "step-00000008", "step-00000012"]
    assert [event["step"] for event in undisturbed.events("finished")] == [STEPS]
    assert not (undisturbed.folder / "lease.json").exists()


def test_every_second_is_booked_once_in_the_events(undisturbed: Job) -> None:
    assert {kind for record in undisturbed.records() for kind in record["seconds"]} <= set(KINDS.values())
    assert [event["step"] for event in undisturbed.events("booked")] == [4, 8, 12]
    spent = undisturbed.account()
    assert undisturbed.booked() == pytest.approx(spent.seconds, abs=0.01)
    for kind in ("start", "step", "data_wait", "evaluation", "checkpoint_stall"):
        assert spent.seconds[kind] > 0.0, kind
    assert spent.seconds["lost_work"] < 0.01


@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_stopped_at_any_step_it_saves_and_goes_on_bit_for_bit(
    tmp_path: Path, data: Path, undisturbed: Job, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    job = Job(tmp_path, data)

    def ask(run: Run, data_step: int) -> None:
        if data_step == step - 1:
            (job.folder / "STOP").touch()

    assert job.train(monkeypatch, ask) == STOPPED
    [stopped] = job.events("stopped")
    assert (stopped["step"], stopped["reason"]) == (step, "STOP file")
    assert job.checkpoints()[-1] == f"step-{step:08d}"
    assert not (job.folder / "STOP").exists(), "else the next start would stop again"
    assert job.train(monkeypatch) == FINISHED
    assert job.losses() == undisturbed.losses()
    assert job.differs_from(undisturbed) == []


STAGES = ["read_jsonl", "announce", "build_engine", "resume"]
"""Functions that are called on the way to the first step."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_new_run_that_is_stopped_as_it_starts_leaves_no_checkpoint_and_can_start(
    tmp_path: Path, data: Path, undisturbed: Job, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    job = Job(tmp_path, data)
    job.stop_as_it_starts(monkeypatch, stage)
    [stopped] = job.events("stopped")
    assert (stopped["phase"], stopped["reason"]) == ("start", "STOP file")
    assert not list(job.folder.glob("checkpoints/*"))
    assert job.train(monkeypatch) == FINISHED
    assert job.losses() == undisturbed.losses()
    assert [event["attempt"] for event in job.events("started")] == [1, 2]


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_that_is_stopped_as_it_starts_keeps_its_checkpoints(
    tmp_path: Path, data: Path, undisturbed: Job, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    job = Job(tmp_path, data)
    shutil.copytree(undisturbed.folder, job.folder)
    shutil.rmtree(job.folder / f"checkpoints/step-{STEPS:08d}")
    job.stop_as_it_starts(monkeypatch, stage)
    assert job.checkpoints() == ["step-00000004", "step-00000008"]
    assert job.train(monkeypatch) == FINISHED
    assert job.differs_from(undisturbed) == []
    assert job.booked() == pytest.approx(job.account().seconds, abs=0.02)
    assert job.booked()["lost_work"] > 0.0, "steps 9 to 12 were trained again"


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(
    tmp_path: Path, data: Path, undisturbed: Job, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    job = Job(tmp_path, data)
    assert job.train(monkeypatch, spoil(5, factor)) == FINISHED
    [skipped] = job.events("skipped")
    assert (skipped["step"], skipped["data_step"], skipped["first_sample"], skipped["samples"]) == (5, 5, 20, 4)
    losses = job.losses()
    assert {s: losses[s] for s in range(1, 6)} == {s: undisturbed.losses()[s] for s in range(1, 6)}
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
    """The bad batch moved nothing in either; the steps since the checkpoint come out the same."""
    skipping, rolling = Job(tmp_path, data, "skip", on_spike="skip"), Job(tmp_path, data, "roll", on_spike="rollback")
    assert skipping.train(monkeypatch, spoil(6, 1000.0)) == FINISHED
    assert rolling.train(monkeypatch, spoil(6, 1000.0)) == FINISHED
    [rolled] = rolling.events("rolled_back")
    assert (rolled["step"], rolled["data_step"]) == (6, 6)
    assert [event["step"] for event in rolling.events("resumed")] == [4]
    assert [record["step"] for record in rolling.records()] == [*range(1, 7), *range(5, STEPS + 1)]
    assert rolling.losses() == skipping.losses()
    assert rolling.differs_from(skipping) == []
    [settled] = rolling.events("settled")
    assert settled["seconds"]["lost_work"] == pytest.approx(rolling.account().seconds["lost_work"], abs=0.02)
    assert rolling.booked() == pytest.approx(rolling.account().seconds, abs=0.02)


def test_a_roll_back_before_the_first_checkpoint_skips(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, data, on_spike="rollback")
    job.recipe = job.recipe.model_copy(update={"checkpoint": job.recipe.checkpoint.model_copy(update={"every": STEPS})})
    assert job.train(monkeypatch, spoil(5, 1000.0)) == FINISHED
    assert [event["data_step"] for event in job.events("rolled_back")] == [5]
    [skipped] = job.events("skipped")
    assert (skipped["data_step"], skipped["why"]) == (5, "there is no checkpoint to go back to")


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
    job = Job(tmp_path, data, max_in_a_row=3)
    with pytest.raises(DivergedError, match=r"bad step number 4 at data step 8 .*max_in_a_row \(3\)"):
        job.train(monkeypatch, spoil(5, math.nan, times=99))
    [failed] = job.events("failed")
    assert failed["exit_code"] == 2
    assert "the run has diverged" in failed["error"]


def test_a_batch_without_targets_is_skipped_with_its_samples(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, data)
    calls = iter(range(1000))
    true = loop.count_targets_by_source
    monkeypatch.setattr(
        loop, "count_targets_by_source", lambda batches, n: true(batches, n) * (0.0 if next(calls) == 3 else 1.0)
    )
    assert job.train(monkeypatch) == FINISHED
    [skipped] = job.events("skipped")
    assert (skipped["data_step"], skipped["why"]) == (3, "no targets in the batch")
    assert job.losses()[STEPS][2] == STEPS + 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
def test_a_compiled_run_compiles_in_its_first_step_only_and_its_checkpoint_does_not_show_it(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With LayerNorm, for RMSNorm has another backward pass when it is not compiled (`train.model.recompute`)."""
    plain, job = Job(tmp_path, data, "plain"), Job(tmp_path, data)
    for one in (plain, job):
        model = one.recipe.model.model_copy(update={"norm": "layernorm"})
        parallel = one.recipe.parallel.model_copy(update={"compile": one is job})
        one.recipe = one.recipe.model_copy(update={"model": model, "parallel": parallel})
    assert plain.train(monkeypatch) == FINISHED
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # quick, and the same bits
    assert job.train(monkeypatch) == FINISHED
    first, second = ({"compile", "step"} & record["seconds"].keys() for record in job.records()[:2])
    assert (first, second) == ({"compile", "step"}, {"step"})
    assert job.events("compiled_again") == []
    assert job.losses() == plain.losses()
    assert job.differs_from(plain) == []


def test_one_process_begins_without_torchs_compiler_and_without_dtensor(data: Path, tmp_path: Path) -> None:
    """Each takes half a second to import. The whole product runs here, and its first save comes after step 4."""
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
