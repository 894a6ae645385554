"""Runs on the cluster, the run without faults that they are compared with, and the cost of a fault."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.build.prepare import BuildOptions, build_dataset
from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from tests.slurm.cluster import Cluster
from tests.slurm.machines import processes_with, until
from train.checkpoint.format.compare import differences
from train.records.jsonl import read_jsonl

ROOT = Path(__file__).parents[2]
KEEPSTEP = [sys.executable, "-m", "launch.cli"]
STEPS = 40
RECIPE = {
    "model": {"vocab_size": 512, "seq_len": 32, "n_layers": 2, "n_heads": 2, "d_model": 32},
    "optim": {"lr": 1e-3, "warmup_steps": 2},
    "train": {"steps": STEPS, "global_batch_size": 12, "micro_batch_size": 2, "log_every": 10, "eval_sequences": 0},
    "parallel": {"engine": "fsdp2", "device": "cpu"},
    "checkpoint": {"every": 5, "keep_last": 2},
}
SITE = "CPUS_PER_NODE=2\nRANKS_PER_NODE=1\nWARN_SECONDS=30\nHEALTH_OPTIONS='--min-free-gib 0.1 --min-memory-gib 0.1'\n"


HEADER = (
    "| fault | seconds to the next step | seconds after Slurm noticed | relative to a plain start | repeated steps |\n"
    "| --- | --- | --- | --- | --- |"
)


@dataclass
class Row:
    """One line of the table."""

    event: str
    seconds: float | None
    """Seconds from the fault to the first step that no attempt had reached; None if no new attempt was needed."""
    noticed: float | None
    """Seconds from the fault until Slurm reported the node as down."""
    plain_start: float
    """Seconds from the start of the job script to the first step, in the job's first attempt."""
    repeated_steps: int
    """Number of steps trained before the fault and again after it."""

    def __str__(self) -> str:
        seconds = beyond = ratio = ""
        if self.seconds is None:
            seconds = "no restart"
        else:
            seconds, ratio = f"{self.seconds:.1f}", f"{self.seconds / self.plain_start:.2f}"
            beyond = "" if self.noticed is None else f"{self.seconds - self.noticed:.1f}"
        return f"| {self.event} | {seconds} | {beyond} | {ratio} | {self.repeated_steps} |"


def build_data(folder: Path) -> Path:
    """Build a small data set from the sources of this repository; returns its folder."""
    texts = [path.read_text() for path in sorted(ROOT.glob("*/*.py"))]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_sentencepiece(texts, folder / "tokenizer", vocab_size=512)
    build_dataset([str(corpus)], folder / "data", folder / "tokenizer", BuildOptions(seq_len=32))
    return folder / "data"


class Lab:
    """A cluster, a data set, and a run without faults (`reference`), which is trained at construction."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        data = {"sources": [{"path": str(build_data(folder))}]}
        self.recipe = folder / "recipe.json"  # JSON is YAML
        self.recipe.write_text(json.dumps({"name": "x", "runs_dir": str(folder / "runs"), "data": data, **RECIPE}))
        self.site = folder / "cluster.env"
        self.site.write_text(SITE)
        self.reference = Job(self, "undisturbed")
        result = subprocess.run(
            [*KEEPSTEP, "run", str(self.recipe), "--ranks", "2", "name=undisturbed"],
            cwd=ROOT,
            env=cluster.env,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr


class Job:
    """A run submitted with `keepstep submit`."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab, self.cluster, self.name = lab, lab.cluster, name
        self.folder = lab.folder / "runs" / name
        self.id = ""
        self.running_since: float | None = None

    def submit(self, *options: str, sbatch: tuple[str, ...] = (), warned: bool = True) -> "Job":
        """Submit the run; returns this job.

        With `sbatch` options, sbatch submits the rendered script. `warned` false removes its --signal."""
        argv = [*KEEPSTEP, "submit", str(self.lab.recipe), f"name={self.name}", "--cluster", str(self.lab.site)]
        argv += ["--nodes", "2", *options]
        if sbatch:
            script = self.cluster.run("ctl", [*argv, "--dry-run"], cwd=ROOT).stdout
            lines = [line for line in script.splitlines() if warned or "#SBATCH --signal" not in line]
            self.folder.mkdir(parents=True)
            (self.folder / "logs").mkdir()
            (self.folder / "by-hand.sbatch").write_text("\n".join(lines))
            self.id = self.cluster.slurm("sbatch", "--parsable", *sbatch, str(self.folder / "by-hand.sbatch"))
        else:
            result = self.cluster.run("ctl", argv, cwd=ROOT)
            assert result.returncode == 0, result.stderr
            self.id = result.stdout.split()[1]
        return self

    def show(self) -> dict[str, str]:
        """Slurm's fields of the job."""
        return self.cluster.job(self.id)

    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each step, of repeated steps too."""
        return [record for record in read_jsonl(self.folder / "metrics.jsonl") if "loss" in record]

    def reached(self) -> int:
        """The highest step that was finished; 0 if there is none."""
        return max((record["step"] for record in self.steps()), default=0)

    def wait_step(self, step: int, limit_seconds: float = 300) -> None:
        """Wait until the run has finished a step."""
        if self.running_since is None:
            self.cluster.wait_job(self.id, ("RUNNING", "COMPLETED"))
            self.running_since = time.time()
        try:
            until(lambda: self.reached() >= step, limit_seconds, f"step {step} of {self.name}")
        except TimeoutError as error:
            raise AssertionError(f"{error}; the job is {self.show()}\n{self.log()}") from None

    def log(self) -> str:
        """The output of all attempts."""
        return "\n".join(path.read_text() for path in sorted((self.folder / "logs").glob("slurm-*.log")))

    def after(self, event: str, moment: float, noticed: float | None = None) -> Row:
        """Wait for the end, compare the run with the reference, and return what the fault cost.

        `moment` and `noticed`: when the fault happened and when Slurm reported the node as down, in seconds since the
        epoch."""
        self.assert_equals_reference()
        steps = self.steps()
        before = [record for record in steps if record["time"] <= moment]
        attempt = max(record["attempt"] for record in before)
        first = [record for record in steps if record["attempt"] == attempt]
        later = [record for record in steps if record["attempt"] > attempt]
        new = [record for record in later if record["step"] > max(record["step"] for record in first)]
        return Row(
            event,
            new[0]["time"] - moment if new else None,
            None if noticed is None else noticed - moment,
            steps[0]["time"] - (self.running_since or 0),
            len(steps) - len({record["step"] for record in steps}),
        )

    def assert_equals_reference(self) -> None:
        """Wait for the end; assert that losses and weights are those of the reference and that no process is left."""
        try:
            self.cluster.wait_job(self.id, ("COMPLETED",), 600)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None
        assert self.losses() == self.lab.reference.losses(), self.log()
        first, second = (run.folder / f"checkpoints/step-{STEPS:08d}" for run in (self, self.lab.reference))
        different = list(differences(first, second))
        assert not different, different
        self.assert_no_process_left()

    def losses(self) -> dict[int, float]:
        """Loss by step. For a repeated step, that of its last execution."""
        return {record["step"]: record["loss"] for record in self.steps()}

    def assert_no_process_left(self, limit_seconds: float = 120) -> None:
        """Wait until no process of the run is alive on any machine."""
        run = str(self.folder.resolve())
        try:
            until(lambda: not processes_with("KEEPSTEP_RUN", run), limit_seconds, "all processes of the run to end")
        except TimeoutError:
            raise AssertionError(f"left over: {processes_with('KEEPSTEP_RUN', run)}") from None

    def ranks(self) -> dict[int, int]:
        """Pid of each rank, as this machine sees it."""
        return self._pids("-m train", "RANK")

    def agents(self) -> dict[int, int]:
        """Pid of torchrun on each node, by node number."""
        return self._pids("-m launch.supervise.agent", "SLURM_NODEID")

    def _pids(self, command: str, number: str) -> dict[int, int]:
        found = {}
        for pid, line in processes_with("KEEPSTEP_RUN", str(self.folder.resolve())).items():
            if command in line and ("-m launch.supervise.agent" in line) == ("-m launch.supervise.agent" in command):
                env = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                found[int(next(v for v in env if v.startswith(f"{number}=")).partition("=")[2])] = pid
        return found

    @contextlib.contextmanager
    def ranks_stopped(self) -> Iterator[None]:
        """Stop all ranks (SIGSTOP) during the block."""
        ranks = self.ranks().values()
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        yield
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def head_node(self) -> str:
        """Name of the node that runs the job script."""
        return self.show()["BatchHost"]

    def worker_node(self) -> str:
        """Name of another node of the job."""
        nodes = self.cluster.slurm("scontrol", "show", "hostnames", self.show()["NodeList"]).split()
        return next(node for node in nodes if node != self.head_node())
