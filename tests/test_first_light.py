"""The main workflow on real text: train, stop, resume, resume on other ranks, export, and all kinds of bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from train.exit_codes import FAILED_FOR_GOOD, FINISHED, STOPPED
from train.health.injected_faults import VARIABLE
from train.records.jsonl import read_jsonl

ROOT = Path(__file__).parents[1]
STEPS = 12
LIMIT_SECONDS = 600
"""Longest time of one command, even on a busy machine."""
TINY = [
    "model.vocab_size=512",
    "model.seq_len=64",
    "model.n_layers=2",
    "model.d_model=64",
    "optim.warmup_steps=2",
    f"train.steps={STEPS}",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.log_every=1",
    "train.eval_every=0",
    "train.eval_sequences=8",
    "checkpoint.every=4",
]

pytestmark = pytest.mark.timeout(1500)


class Job:
    """`keepstep run` of a tiny version of the laptop recipe, in its own run folder."""

    def __init__(self, root: Path, name: str, ranks: int, *overrides: str) -> None:
        self.folder = root / "runs" / name
        data = f"data.sources.0.path={root / 'data'}"
        settings = [*TINY, data, f"runs_dir={root / 'runs'}", f"name={name}", *overrides]
        self.argv = ["run", "recipes/laptop.yaml", "--ranks", str(ranks), *settings]

    def run(self) -> int:
        """Run the command to its end and return its exit code."""
        process = keepstep_process(*self.argv)
        self.output, _ = process.communicate(timeout=LIMIT_SECONDS)
        return process.returncode

    def run_until(self, step: int, number: signal.Signals) -> int:
        """Run the command, send it a signal after `step` steps, and return its exit code.

        The fault `freeze` stops rank 1 after that step, and the test resumes it once the signal has reached it. So the
        run cannot finish before the signal, however slow the machine is."""
        marks = self.folder.parents[1] / "marks" / self.folder.name
        marks.mkdir(parents=True)
        freeze = {"fault": "freeze", "rank": 1, "step": step, "phase": "data"}
        process = keepstep_process(*self.argv, **{VARIABLE: json.dumps({"marks": str(marks), "faults": [freeze]})})
        rank = wait_for(self._frozen_rank, process)
        process.send_signal(number)
        wait_for(lambda: is_pending(rank, number), process)
        rank.resume()
        self.output, _ = process.communicate(timeout=LIMIT_SECONDS)
        return process.returncode

    def _frozen_rank(self) -> psutil.Process | None:
        """The rank of this run that a signal has stopped."""
        for process in psutil.process_iter():
            try:
                of_this_run = process.environ().get("KEEPSTEP_RUN") == str(self.folder.resolve())
                if of_this_run and process.status() == psutil.STATUS_STOPPED:
                    return process
            except psutil.Error:
                continue
        return None

    def losses(self) -> dict[int, float]:
        """Loss by step. For a repeated step, that of its last execution."""
        return {r["step"]: r["loss"] for r in read_jsonl(self.folder / "metrics.jsonl") if "loss" in r}


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """The first true result of the condition, while the process is alive."""
    while not (result := condition()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    return result


def is_pending(process: psutil.Process, number: signal.Signals) -> bool:
    """Whether a stopped process will receive this signal as soon as it is resumed."""
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def keepstep_process(*argv: str, **env: str) -> subprocess.Popen[str]:
    """Start a `keepstep` command whose output is a pipe. `env`: additional environment variables."""
    return subprocess.Popen(
        [sys.executable, "-m", "launch.cli", *argv],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def keepstep(*argv: str) -> tuple[int, str]:
    """Exit code and output of a `keepstep` command."""
    process = keepstep_process(*argv)
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    return process.returncode, output


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set built from the sources of this repository."""
    root = tmp_path_factory.mktemp("first-light")
    with (root / "corpus.jsonl").open("w") as lines:
        for file in sorted(ROOT.glob("*/*.py")):
            lines.write(json.dumps({"text": file.read_text()}) + "\n")
    corpus, tokenizer, data = (str(root / name) for name in ("corpus.jsonl", "tokenizer", "data"))
    for argv in (
        ["data", "tokenizer", corpus, "--out", tokenizer, "--vocab-size", "512"],
        ["data", "build", corpus, "--out", data, "--tokenizer", tokenizer, "--seq-len", "64"],
    ):
        code, output = keepstep(*argv)
        assert code == 0, output
    return root


@pytest.fixture(scope="module")
def uninterrupted(root: Path) -> Job:
    """A run of all steps in one start."""
    job = Job(root, "uninterrupted", 2)
    assert job.run() == FINISHED, job.output
    return job


def test_the_loss_falls(uninterrupted: Job) -> None:
    losses = uninterrupted.losses()
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1] - 0.5


def test_a_run_folder_has_the_documented_files_and_events(uninterrupted: Job) -> None:
    names = {path.name for path in uninterrupted.folder.iterdir()}
    assert {"recipe.yaml", "metrics.jsonl", "events.jsonl", "tensorboard", "checkpoints", "logs"} <= names
    kinds = [event["kind"] for event in read_jsonl(uninterrupted.folder / "events.jsonl")]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert kinds.count("saved") == 3


def test_a_run_that_ctrl_c_stopped_resumes_with_the_same_losses_bit_for_bit(root: Path, uninterrupted: Job) -> None:
    job = Job(root, "stopped", 2)
    assert job.run_until(6, signal.SIGINT) == STOPPED, job.output
    (stopped,) = [e for e in read_jsonl(job.folder / "events.jsonl") if e["kind"] == "stopped"]
    assert 6 <= stopped["step"] < STEPS
    assert (job.folder / "checkpoints" / f"step-{stopped['step']:08d}" / "manifest.json").exists()
    assert job.run() == FINISHED, job.output
    assert job.losses() == uninterrupted.losses()
    code, output = keepstep(
        "checkpoint", "diff", *(str(j.folder / f"checkpoints/step-{STEPS:08d}") for j in (job, uninterrupted))
    )
    assert code == 0, output


def test_a_run_resumes_under_another_engine_and_number_of_ranks(root: Path, uninterrupted: Job) -> None:
    """Saved by FSDP2 on two ranks, resumed by a single process: the same samples, and losses equal but for rounding."""
    first = Job(root, "moved", 2, "parallel.precision=fp32")
    reference = Job(root, "reference", 2, "parallel.precision=fp32")
    assert reference.run() == FINISHED, reference.output
    assert first.run_until(5, signal.SIGTERM) == STOPPED, first.output
    second = Job(root, "moved", 1, "parallel.precision=fp32", "parallel.engine=single")
    assert second.run() == FINISHED, second.output
    losses, expected = second.losses(), reference.losses()
    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_export_equals_the_model_and_generate_continues_a_prompt(root: Path, uninterrupted: Job) -> None:
    out = root / "exported"
    code, output = keepstep("export", str(uninterrupted.folder), "--out", str(out), "--check")
    assert code == 0, output
    assert "the ids of training on" in output
    code, output = keepstep("generate", str(uninterrupted.folder), "--prompt", "def ", "--tokens", "8")
    assert code == 0
    assert output.startswith("def ")
    assert len(output) > len("def \n")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.sources.0.path=no/such"], "no/such"),
        (["model.vocab_size=100"], r"model.vocab_size (100) must be at least the tokenizer's size (512)"),
        (["train.global_batch_size=9", "train.micro_batch_size=3"], "use 6 or 12"),
        (["model.seq_len=48"], "48"),
        (["train.stepz=1"], "did you mean train.steps?"),
        (["name=uninterrupted", "model.d_model=128", "train.steps=20"], "d_model"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2_and_writes_no_checkpoint(
    root: Path, uninterrupted: Job, overrides: list[str], message: str
) -> None:
    before = sorted(uninterrupted.folder.rglob("step-*"))
    job = Job(root, "bad", 2, *overrides)
    assert job.run() == FAILED_FOR_GOOD, job.output
    lines = [line for line in job.output.splitlines() if message in line]
    assert lines, job.output
    assert "Traceback" not in job.output
    assert not (root / "runs" / "bad" / "checkpoints").exists()
    assert sorted(uninterrupted.folder.rglob("step-*")) == before


def test_all_ranks_replace_a_block_that_one_rank_finds_damaged(root: Path) -> None:
    damaged = root / "damaged"
    shutil.copytree(root / "data", damaged)
    shard = max(damaged.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    source = f"data.sources.0.path={damaged}"
    assert Job(root, "refused", 2, source).run() == FAILED_FOR_GOOD
    job = Job(root, "quarantine", 2, source, "data.on_bad_block=quarantine")
    assert job.run() == FINISHED, job.output
    (shared,) = [e for e in read_jsonl(job.folder / "events.jsonl") if e["kind"] == "blocks_quarantined"]
    manifest = json.loads((job.folder / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").read_text())
    first, second = (state["quarantined"] for state in manifest["rank_states"])
    assert first == second
    assert len(first) == 1
    assert shared["data_step"] < STEPS


def test_a_resume_under_another_schedule_is_refused_unless_allowed(root: Path) -> None:
    longer = [f"train.steps={STEPS + 2}", "parallel.engine=single"]
    assert Job(root, "longer", 1, "parallel.engine=single").run() == FINISHED
    refused = Job(root, "longer", 1, *longer)
    assert refused.run() == FAILED_FOR_GOOD
    assert f"schedule.steps: {STEPS} in the checkpoint, {STEPS + 2} in this run" in refused.output
    allowed = Job(root, "longer", 1, *longer, "--allow", "schedule")
    assert allowed.run() == FINISHED, allowed.output
    assert max(allowed.losses()) == STEPS + 2
    kinds = [(e["kind"], e.get("name")) for e in read_jsonl(allowed.folder / "events.jsonl")]
    assert ("allowed_difference", "schedule.steps") in kinds
