"""What a cluster does to a run, and what must be true afterwards: the losses and weights of an undisturbed run.

`python -m tests.slurm.drills [NAME ...]` runs the drills, on a cluster of its own for each, and prints a table. A drill
submits a real job of two nodes, waits for a step, does its damage, and returns once the run is finished.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.prepare import BuildOptions, build_dataset
from data_pipeline.sentencepiece_training import train_sentencepiece
from tests.slurm.cluster import Cluster
from tests.slurm.machines import processes_with, until
from train.checkpoint.compare import differences
from train.events import read_jsonl

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


@dataclass
class Row:
    """A line of the table."""

    event: str
    seconds: float | None
    """From the event to the first step of the next attempt that is beyond all before; None: no attempt was needed."""
    steps_lost: int
    """Trained before the event and again after it."""

    def __str__(self) -> str:
        return f"| {self.event} | {'no stop' if self.seconds is None else f'{self.seconds:.1f}'} | {self.steps_lost} |"


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

    def submit(self, *options: str, sbatch: tuple[str, ...] = ()) -> "Job":
        """With `sbatch` options the rendered script is submitted by hand."""
        argv = [*KEEPSTEP, "submit", str(self.lab.recipe), f"name={self.name}", "--cluster", str(self.lab.site)]
        argv += ["--nodes", "2", *options]
        if sbatch:
            script = self.cluster.run("ctl", [*argv, "--dry-run"], cwd=ROOT).stdout
            self.folder.mkdir(parents=True)
            (self.folder / "logs").mkdir()
            (self.folder / "by-hand.sbatch").write_text(script)
            self.id = self.cluster.slurm("sbatch", "--parsable", *sbatch, str(self.folder / "by-hand.sbatch"))
        else:
            result = self.cluster.run("ctl", argv, cwd=ROOT)
            assert result.returncode == 0, result.stderr
            self.id = result.stdout.split()[1]
        return self

    def steps(self) -> list[dict[str, Any]]:
        return [record for record in read_jsonl(self.folder / "metrics.jsonl") if "loss" in record]

    def reached(self) -> int:
        return max((record["step"] for record in self.steps()), default=0)

    def wait_step(self, step: int, limit_seconds: float = 90) -> None:
        try:
            until(lambda: self.reached() >= step, limit_seconds, f"step {step} of {self.name}")
        except TimeoutError as error:
            raise AssertionError(f"{error}; it is {self.cluster.job(self.id)}\n{self.log()}") from None

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.folder / "logs").glob("slurm-*.log")))

    def after(self, event: str, moment: float) -> Row:
        """Wait for the end and check everything; what the event cost."""
        self.must_equal_the_undisturbed()
        steps = self.steps()
        before = [record for record in steps if record["time"] <= moment]
        attempt = max(record["attempt"] for record in before)
        first = [r for r in steps if r["attempt"] == attempt]
        later = [r for r in steps if r["attempt"] > attempt]
        new = [r for r in later if r["step"] > max(record["step"] for record in first)]
        return Row(event, new[0]["time"] - moment if new else None, len(steps) - len({r["step"] for r in steps}))

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
        found = {}
        for pid, command in processes_with("KEEPSTEP_RUN", str(self.folder.resolve())).items():
            if "-m train" in command and "-m launch.agent" not in command:
                env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found[int(next(v for v in env if v.startswith(b"RANK="))[5:])] = pid
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
        return self.cluster.job(self.id)["BatchHost"]

    def worker_node(self) -> str:
        nodes = self.cluster.slurm("scontrol", "show", "hostnames", self.cluster.job(self.id)["NodeList"]).split()
        return next(node for node in nodes if node != self.head_node())


def disturb(lab: Lab, name: str, event: str, act: Callable[[Job], object], *options: str, at_step: int = 12) -> Row:
    """The common course of a drill: submit, wait for a step, act, compare."""
    job = Job(lab, name).submit(*options)
    job.wait_step(at_step)
    moment = time.time()
    act(job)
    return job.after(event, moment)


def stop_signal(lab: Lab) -> Row:
    return disturb(lab, "usr2", "`scancel -s USR2`", lambda job: lab.cluster.slurm("scancel", "-s", "USR2", job.id))


def rank_killed(lab: Lab) -> Row:
    return disturb(lab, "kill-rank", "kill -9 of a rank", lambda job: os.kill(job.ranks()[1], signal.SIGKILL))


def torchrun_killed(lab: Lab) -> Row:
    def act(job: Job) -> None:
        run = str(job.folder.resolve())
        agents = {pid: c for pid, c in processes_with("KEEPSTEP_RUN", run).items() if "-m launch.agent" in c}
        os.kill(min(agents), signal.SIGKILL)

    return disturb(lab, "kill-torchrun", "kill -9 of torchrun", act)


def worker_powered_off(lab: Lab) -> Row:
    return disturb(lab, "off-worker", "power-off of a worker", lambda job: lab.cluster.power_off(job.worker_node()))


def head_powered_off(lab: Lab) -> Row:
    return disturb(lab, "off-head", "power-off of the head node", lambda job: lab.cluster.power_off(job.head_node()))


def network_cut(lab: Lab) -> Row:
    """Cut, and mended after Slurm gave the node up: its old processes must be gone in the end."""
    cut = ""

    def act(job: Job) -> None:
        nonlocal cut
        cut = job.worker_node()
        lab.cluster.cut(cut)
        until(lambda: int(lab.cluster.job(job.id).get("Restarts", "0")) > 0, 60, "the requeue")
        lab.cluster.mend(cut)

    return disturb(lab, "cut", "network of a worker cut, later mended", act)


def slurmd_killed_and_back(lab: Lab) -> Row:
    def act(job: Job) -> None:
        node = job.worker_node()
        lab.cluster.kill_daemon(node)
        time.sleep(2)
        lab.cluster.start_daemon(node)

    return disturb(lab, "slurmd", "slurmd killed, back after 2 s", act)


def slurmd_killed_for_good(lab: Lab) -> Row:
    """Slurm gives up the node, but the ranks on it are alive; with the others gone they must end by themselves."""

    def act(job: Job) -> None:
        with job.held():
            lab.cluster.kill_daemon(job.worker_node())
            until(lambda: int(lab.cluster.job(job.id).get("Restarts", "0")) > 0, 60, "the requeue")

    return disturb(lab, "slurmd-gone", "slurmd killed for good", act)


def node_set_down(lab: Lab) -> Row:
    def act(job: Job) -> None:
        lab.cluster.slurm("scontrol", "update", f"NodeName={job.worker_node()}", "State=DOWN", "Reason=drill")

    return disturb(lab, "state-down", "`scontrol update State=DOWN`", act)


def controller_restarted(lab: Lab) -> Row:
    def act(job: Job) -> None:
        lab.cluster.kill_daemon("ctl")
        time.sleep(2)
        lab.cluster.start_daemon("ctl")
        until(lambda: lab.cluster.job(job.id), 20, "the controller to answer")

    return disturb(lab, "slurmctld", "slurmctld killed, back after 2 s", act)


def time_limit(lab: Lab) -> Row:
    """The ranks are held until the warning comes, so that a short run meets it."""
    job = Job(lab, "time-limit").submit("--time", "1")
    job.wait_step(12)
    with job.held():
        until(lambda: "SIGUSR2: asking the ranks" in job.log(), 120, "the warning before the time limit")
    return job.after("time limit, warned by USR2", time.time())


def _preempt(lab: Lab, name: str, event: str, partition: str) -> Row:
    job = Job(lab, name).submit(sbatch=(f"--partition={partition}",))
    job.wait_step(12)
    moment = time.time()
    urgent = ("sbatch", "--parsable", "-p", "urgent", "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3")
    urgent_id = lab.cluster.slurm(*urgent)
    lab.cluster.wait_job(urgent_id, ("RUNNING", "COMPLETED"), 60)
    return job.after(event, moment)


def preempted_with_grace(lab: Lab) -> Row:
    return _preempt(lab, "preempt-grace", "preempted with grace", "spot")


def preempted_at_once(lab: Lab) -> Row:
    return _preempt(lab, "preempt", "preempted without grace", "main")


DRILLS = {
    drill.__name__: drill
    for drill in (
        stop_signal,
        rank_killed,
        torchrun_killed,
        slurmd_killed_and_back,
        controller_restarted,
        node_set_down,
        preempted_with_grace,
        preempted_at_once,
        time_limit,
        worker_powered_off,
        head_powered_off,
        network_cut,
        slurmd_killed_for_good,
    )
}


def main(names: list[str]) -> int:
    print("| event | seconds to the next step | steps done again |\n| --- | --- | --- |", flush=True)
    failed = 0
    for name in names or list(DRILLS):
        with tempfile.TemporaryDirectory(prefix="drill-") as folder:
            cluster = Cluster(Path(folder) / "slurm", nodes=3).up()
            try:
                row = DRILLS[name](Lab(cluster, Path(folder)))
                print(row, flush=True)
            except (AssertionError, TimeoutError, KeyboardInterrupt) as error:
                failed += 1
                print(f"| {name} | FAILED | |", flush=True)
                logs = [path.read_text() for path in sorted(Path(folder).glob("runs/*/logs/slurm-*.log"))]
                print(*logs, cluster.slurm("scontrol", "show", "job"), repr(error), sep="\n", file=sys.stderr)
            finally:
                cluster.down()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
