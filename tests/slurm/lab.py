"""A run submitted to the cluster, the undisturbed run that it is compared with, and what an event cost it."""

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
from train.records.events import read_jsonl

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
    "| event | seconds to the next step | of these after Slurm's notice | times a plain start | steps done again |\n"
    "| --- | --- | --- | --- | --- |"
)


@dataclass
class Row:
    """A line of the table."""

    event: str
    seconds: float | None
    """From the event to the first step of the next attempt that is beyond all before; None: no attempt was needed."""
    noticed: float | None
    """From the event until Slurm called the node down."""
    plain_start: float
    """From the start of the job script to the first step, in the job's first attempt."""
    steps_lost: int
    """Trained before the event and again after it."""

    def __str__(self) -> str:
        seconds = beyond = ratio = ""
        if self.seconds is None:
            seconds = "no stop"
        else:
            seconds, ratio = f"{self.seconds:.1f}", f"{self.seconds / self.plain_start:.2f}"
            beyond = "" if self.noticed is None else f"{self.seconds - self.noticed:.1f}"
        return f"| {self.event} | {seconds} | {beyond} | {ratio} | {self.steps_lost} |"


def build_data(folder: Path) -> Path:
    """A small data set of this repository's own sources."""
    texts = [path.read_text() for path in sorted(ROOT.glob("*/*.py"))]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_sentencepiece(texts, folder / "tokenizer", vocab_size=512)
    build_dataset([str(corpus)], folder / "data", folder / "tokenizer", BuildOptions(seq_len=32))
    return folder / "data"


class Lab:
    """A cluster, a data set, and the run that nothing disturbs."""

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
            timeout=150,
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
        """With `sbatch` options the rendered script is submitted by hand; not `warned`: without its --signal."""
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
        return self.cluster.job(self.id)

    def steps(self) -> list[dict[str, Any]]:
        return [record for record in read_jsonl(self.folder / "metrics.jsonl") if "loss" in record]

    def reached(self) -> int:
        return max((record["step"] for record in self.steps()), default=0)

    def wait_step(self, step: int, limit_seconds: float = 90) -> None:
        if self.running_since is None:
            self.cluster.wait_job(self.id, ("RUNNING",), 30)
            self.running_since = time.time()
        try:
            until(lambda: self.reached() >= step, limit_seconds, f"step {step} of {self.name}")
        except TimeoutError as error:
            raise AssertionError(f"{error}; it is {self.show()}\n{self.log()}") from None

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.folder / "logs").glob("slurm-*.log")))

    def after(self, event: str, moment: float, noticed: float | None = None) -> Row:
        """Wait for the end and check everything; what the event cost. `noticed`: when Slurm called the node down."""
        self.must_equal_the_undisturbed()
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

    def must_equal_the_undisturbed(self, states: tuple[str, ...] = ("COMPLETED",)) -> None:
        try:
            self.cluster.wait_job(self.id, states, 150)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None
        assert self.losses() == self.lab.reference.losses(), self.log()
        mine, theirs = (folder / f"checkpoints/step-{STEPS:08d}" for folder in (self.folder, self.lab.reference.folder))
        apart = list(differences(mine, theirs))
        assert not apart, apart
        self.no_process_left()

    def losses(self) -> dict[int, float]:
        """By step; of a step that was done twice, the last."""
        return {record["step"]: record["loss"] for record in self.steps()}

    def no_process_left(self, limit_seconds: float = 15) -> None:
        run = str(self.folder.resolve())
        try:
            until(lambda: not processes_with("KEEPSTEP_RUN", run), limit_seconds, "all processes of the run to end")
        except TimeoutError:
            raise AssertionError(f"left over: {processes_with('KEEPSTEP_RUN', run)}") from None

    def ranks(self) -> dict[int, int]:
        """Pid of each rank, as this machine sees them."""
        return self._pids("-m train", "RANK")

    def agents(self) -> dict[int, int]:
        """Pid of each node's torchrun."""
        return self._pids("-m launch.supervise.agent", "SLURM_NODEID")

    def _pids(self, command: str, number: str) -> dict[int, int]:
        found = {}
        for pid, line in processes_with("KEEPSTEP_RUN", str(self.folder.resolve())).items():
            if command in line and ("-m launch.supervise.agent" in line) == ("-m launch.supervise.agent" in command):
                env = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                found[int(next(v for v in env if v.startswith(f"{number}=")).partition("=")[2])] = pid
        return found

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stop the clock of all ranks for a while."""
        ranks = self.ranks().values()
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        yield
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def head_node(self) -> str:
        return self.show()["BatchHost"]

    def worker_node(self) -> str:
        nodes = self.cluster.slurm("scontrol", "show", "hostnames", self.show()["NodeList"]).split()
        return next(node for node in nodes if node != self.head_node())
