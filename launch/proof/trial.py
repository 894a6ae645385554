"""One run of `keepstep prove`, started like any other: on this machine, or on all nodes of a Slurm allocation."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.supervise.secret import VARIABLE, new_secret
from parallel.environ import job_port
from parallel.errors import LaunchError
from train.checkpoint.stores.steps import committed_steps, step_name
from train.exit_codes import FINISHED, STOPPED
from train.records.curve import clean_curve
from train.records.events import read_events
from train.run_folder import RunFolder

ATTEMPTS = 10
"""Starts of one trial before it counts as failed."""
FAULTS_VARIABLE = "KEEPSTEP_FAULTS"
"""The variable of `train.health.injected_faults`, which imports torch and so is not imported here."""


@dataclass(frozen=True)
class Trial:
    """A run with a name, its settings, and the folder that it shares with the other runs of a proof."""

    recipe: str
    name: str
    out: Path
    """Folder of the proof."""
    settings: Sequence[str]
    """Overrides of the recipe."""
    ranks: int
    """Processes on each node."""
    one_node: bool = False
    """Whether the run stays on this node, even in a Slurm allocation of several."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.out / "runs" / self.name

    @property
    def marks(self) -> Path:
        """The folder in which each injected fault leaves a file."""
        return self.out / "marks" / self.name

    def train(self, faults: Sequence[Mapping[str, Any]], max_restarts: int, ends: Sequence[int] = (FINISHED,)) -> None:
        """Train with these faults injected, and start again after a stop, until the exit code is one of `ends`.

        LaunchError for any other exit code, or after ATTEMPTS starts."""
        self.marks.mkdir(parents=True, exist_ok=True)
        env = {VARIABLE: new_secret(), **os.environ}  # with which the nodes sign their messages
        env[FAULTS_VARIABLE] = json.dumps({"marks": str(self.marks.resolve()), "faults": faults})
        log = self.out / f"{self.name}.log"
        for attempt in range(1, ATTEMPTS + 1):
            print(f"run {self.name}, start {attempt}; its log is {log}", file=sys.stderr, flush=True)
            argv = command(os.environ, self.ranks, attempt, self.one_node)
            argv += ["--max-restarts", str(max_restarts), self.recipe, *self.settings, f"name={self.name}"]
            with log.open("a", encoding="utf-8") as output:
                code = subprocess.run(argv, env=env, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
            if code in ends:
                return
            if code != STOPPED:
                raise LaunchError(f"run {self.name} ended with exit code {code}; see the end of {log}")
        raise LaunchError(f"run {self.name} did not finish in {ATTEMPTS} starts; see the end of {log}")

    def curve(self, *names: str) -> dict[int, tuple[float, ...]]:
        """Return these metrics by step; see `curve`."""
        return curve(self.folder, *names)

    def attempts(self) -> int:
        """Return how often the ranks were started."""
        return sum(1 for _ in read_events(RunFolder(self.folder).events, ["started"]))

    def world_size(self) -> int:
        """Return the number of ranks of the last attempt."""
        return world_size(self.folder)

    def injected_faults(self) -> int:
        """Return how many faults were injected so far."""
        return len(list(self.marks.iterdir()))

    def checkpoint(self, step: int) -> Path:
        """Return the folder of a checkpoint, whether it exists or not."""
        return checkpoint_folder(self.folder, step)

    def tensors(self, step: int) -> int:
        """Return the number of tensors in a checkpoint."""
        from train.checkpoint.format.verify import read_manifest
        from train.checkpoint.stores.local import LocalFolder

        return len(read_manifest(LocalFolder(self.checkpoint(step)))[0].state_names)

    def differences(self, other: "Trial", step: int) -> list[str]:
        """Return one line for each fact or tensor in which the checkpoints of a step differ."""
        from train.checkpoint.format.compare import differences

        return list(differences(self.checkpoint(step), other.checkpoint(step)))

    def samples(self, step: int) -> dict[tuple[int, int], tuple[int, int]]:
        """Return what was trained on up to a checkpoint: rows and the sum of their hashes, by source and epoch."""
        from data_pipeline.stream.counters import add, from_json
        from train.checkpoint.format.verify import read_manifest
        from train.checkpoint.stores.local import LocalFolder

        states = read_manifest(LocalFolder(self.checkpoint(step)))[0].rank_states
        return add(*(from_json(state["counters"]) for state in states))


def copy_resume_point(source: Trial, target: Trial, last: int) -> int:
    """Copy the newest checkpoint of `source` up to step `last` to `target`, which will resume from it; its step."""
    step = newest_step_up_to(source.folder, last)
    target.checkpoint(step).parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source.checkpoint(step), target.checkpoint(step))
    return step


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint, whether it exists or not."""
    return RunFolder(run).checkpoints / step_name(step)


def newest_step_up_to(run: Path, last: int) -> int:
    """Return the step of the run's newest checkpoint up to step `last`. LaunchError if there is none."""
    steps = [step for step in committed_steps(RunFolder(run).checkpoints) if step <= last]
    if not steps:
        raise LaunchError(f"{run} has no checkpoint of step {last} or an earlier one; choose a later step")
    return max(steps)


def curve(run: Path, *names: str) -> dict[int, tuple[float, ...]]:
    """Return these metrics by step. Of a step that was trained twice, the later record counts."""
    records = clean_curve(RunFolder(run).metrics)
    return {step: tuple(record.get(name, math.nan) for name in names) for step, record in records.items()}


def world_size(run: Path) -> int:
    """Return the number of ranks of the run's last attempt. LaunchError if it never started."""
    events = RunFolder(run).events
    started = [event for event in read_events(events, ["started"]) if "world_size" in event]
    if not started:
        raise LaunchError(f"{events} has no event `started`, so the number of ranks is not known; name another run")
    return started[-1]["world_size"]


def command(env: Mapping[str, str], ranks: int, attempt: int, one_node: bool) -> list[str]:
    """Return the command that starts a run: `keepstep run`, by srun if this Slurm allocation has several nodes."""
    here = [sys.executable, "-P", "-m", "launch.cli", "run", "--ranks", str(ranks)]
    nodes = int(env.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes == 1 or one_node:
        return here
    port = job_port(int(env["SLURM_JOB_ID"]), attempt)
    srun = ["srun", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    return [*srun, *here, "--nodes", str(nodes), "--head", f"{_first_node(env['SLURM_JOB_NODELIST'])}:{port}"]


def _first_node(nodes: str) -> str:
    """Return the address of the first node; on that node its name may resolve to 127.0.1.1."""

    def ask(*words: str) -> str:
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=True).stdout

    name = ask("show", "hostnames", nodes).split()[0]
    found = re.search(r"NodeAddr=(\S+)", ask("--oneliner", "show", "node", name))
    return found[1] if found else name
