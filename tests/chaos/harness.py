"""Real runs of `keepstep run` with injected faults, and the checks of their results."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from data_pipeline.build.prepare import BuildOptions, build_dataset
from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from train.checkpoint.format.compare import differences
from train.exit_codes import FAILED, STOPPED
from train.health.injected_faults import VARIABLE
from train.records.jsonl import read_jsonl

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 600
"""Longest time of one start of a run, even on a busy machine."""
RECIPE = {
    "model": {"vocab_size": 512, "seq_len": 32, "n_layers": 2, "n_heads": 2, "d_model": 32},
    "optim": {"lr": 1e-3, "warmup_steps": 2},
    "train": {
        "steps": 12,
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "log_every": 1,
        "eval_every": 4,
        "eval_sequences": 4,
        "hang_seconds": 120,
    },
    "parallel": {"engine": "fsdp2", "device": "cpu"},
    "checkpoint": {"every": 3},
    "guard": {"compare_replicas_every": 1},
}


def build_data(folder: Path) -> Path:
    """Build a small data set from the sources of this repository; returns its folder."""
    texts = [path.read_text() for path in sorted(ROOT.glob("train/*.py"))]
    with (folder / "corpus.jsonl").open("w") as lines:
        for text in texts:
            lines.write(json.dumps({"text": text}) + "\n")
    train_sentencepiece(texts, folder / "tokenizer", vocab_size=512)
    build_dataset(
        [str(folder / "corpus.jsonl")],
        folder / "data",
        folder / "tokenizer",
        BuildOptions(seq_len=32, validation_share=0.1),
    )
    return folder / "data"


@dataclass
class Run:
    """One run folder, and the command that trains in it. `overrides` are written as on the command line."""

    root: Path
    name: str
    overrides: tuple[str, ...] = ()
    ranks: int = 2
    output: str = ""
    seconds: float = 0.0

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.root / "runs" / self.name

    def start(self, faults: list[dict[str, Any]] | None = None, max_restarts: int = 8) -> subprocess.Popen[str]:
        """Start the command with these faults to inject; its output is a pipe."""
        recipe = self.root / "recipe.json"  # JSON is YAML
        data = {"sources": [{"path": str(self.root / "data")}]}
        recipe.write_text(json.dumps({"name": "chaos", "runs_dir": str(self.root / "runs"), "data": data, **RECIPE}))
        marks = self.root / "marks" / self.name
        marks.mkdir(parents=True, exist_ok=True)
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        env[VARIABLE] = json.dumps({"marks": str(marks), "faults": faults or []})
        command = [sys.executable, "-m", "launch.cli", "run", str(recipe), "--ranks", str(self.ranks)]
        command += ["--max-restarts", str(max_restarts), f"name={self.name}", *self.overrides]
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def train(
        self, faults: list[dict[str, Any]] | None = None, max_restarts: int = 8, seconds: float = LIMIT_SECONDS
    ) -> int:
        """Run the command to its end and return its exit code. Its output is in `output`. No process may be left."""
        began = time.monotonic()
        process = self.start(faults, max_restarts)
        try:
            self.output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            self.output, _ = process.communicate()
            raise AssertionError(f"the run did not end within {seconds} s:\n{self.output}") from None
        self.seconds = time.monotonic() - began
        assert not self.processes(), self.output
        return process.returncode

    def train_to_the_end(self, faults: list[dict[str, Any]], attempts: int = 50, **options: Any) -> int:
        """Start the command again, as Slurm does, until its exit code says not to; return the last exit code."""
        code = FAILED
        for _ in range(attempts):
            code = self.train(faults, **options)
            if code not in (FAILED, STOPPED):
                break
        return code

    def processes(self) -> list[psutil.Process]:
        """Live processes of this run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("KEEPSTEP_RUN") == str(self.folder.resolve()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def records(self) -> list[dict[str, Any]]:
        """The metrics of each step, of repeated steps too."""
        return [record for record in read_jsonl(self.folder / "metrics.jsonl") if "loss" in record]

    def losses(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm by step. For a repeated step, those of its last execution."""
        return {record["step"]: (record["loss"], record["grad_norm"]) for record in self.records()}

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, in the order of time."""
        return [event for event in read_jsonl(self.folder / "events.jsonl") if event["kind"] == kind]

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.folder / "checkpoints" / f"step-{step:08d}"

    def injected(self) -> set[int]:
        """Numbers of the faults that have been injected."""
        return {int(path.name) for path in (self.root / "marks" / self.name).iterdir()}

    def assert_same_as(self, other: "Run") -> None:
        """Assert that losses, norms, weights, moments and progress are the same, bit for bit."""
        assert self.losses() == other.losses(), self.output
        last = max(other.losses())
        assert list(differences(self.checkpoint(last), other.checkpoint(last))) == [], self.output


def fault(name: str, rank: int, step: int, phase: str) -> dict[str, Any]:
    """A fault of `train.health.injected_faults`, as the environment variable describes it."""
    return {"fault": name, "rank": rank, "step": step, "phase": phase}
