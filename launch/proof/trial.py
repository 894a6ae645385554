"""One run of `keepstep prove`: started like any other, on this machine or on all nodes of a Slurm allocation."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.errors import LaunchError
from train.exit_codes import FINISHED, STOPPED
from train.records.events import read_jsonl

ATTEMPTS = 10
FAULTS_VARIABLE = "KEEPSTEP_FAULTS"


@dataclass(frozen=True)
class Trial:
    recipe: str
    name: str
    out: Path
    settings: Sequence[str]
    ranks: int
    one_node: bool = False

    @property
    def folder(self) -> Path:
        return self.out / "runs" / self.name

    @property
    def marks(self) -> Path:
        return self.out / "marks" / self.name

    def train(self, faults: Sequence[Mapping[str, Any]], max_restarts: int, ends: Sequence[int] = (FINISHED,)) -> None:
        """Start the run, and again when it stopped, until it ends with one of these codes. LaunchError otherwise."""
        self.marks.mkdir(parents=True, exist_ok=True)
        env = os.environ | {FAULTS_VARIABLE: json.dumps({"marks": str(self.marks.resolve()), "faults": faults})}
        log = self.out / f"{self.name}.log"
        for attempt in range(1, ATTEMPTS + 1):
            print(f"run {self.name}, start {attempt}; its log is {log}", flush=True)
            argv = command(os.environ, self.ranks, attempt, self.one_node)
            argv += ["--max-restarts", str(max_restarts), self.recipe, *self.settings, f"name={self.name}"]
            with log.open("a", encoding="utf-8") as output:
                code = subprocess.run(argv, env=env, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
            if code in ends:
                return
            if code != STOPPED:
                raise LaunchError(f"run {self.name} ended with exit code {code}; look at the end of {log}")
        raise LaunchError(f"run {self.name} did not finish in {ATTEMPTS} starts; look at the end of {log}")

    def curve(self, *names: str) -> dict[int, tuple[float, ...]]:
        """By step, the last record of it."""
        records = [record for record in read_jsonl(self.folder / "metrics.jsonl") if "loss" in record]
        return {record["step"]: tuple(record[name] for name in names) for record in records}

    def attempts(self) -> int:
        return sum(event["kind"] == "started" for event in read_jsonl(self.folder / "events.jsonl"))

    def world_size(self) -> int:
        """Of the last attempt."""
        return world_size(self.folder)

    def struck(self) -> int:
        """How many faults have struck."""
        return len(list(self.marks.iterdir()))

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:08d}"

    def tensors(self, step: int) -> int:
        from train.checkpoint.format.verify import read_manifest
        from train.checkpoint.stores.local import LocalFolder

        return len(read_manifest(LocalFolder(self.checkpoint(step)))[0].state_names)

    def differences(self, other: "Trial", step: int) -> list[str]:
        from train.checkpoint.format.compare import differences

        return list(differences(self.checkpoint(step), other.checkpoint(step)))

    def samples(self, step: int) -> dict[tuple[int, int], tuple[int, int]]:
        """What was trained on up to a checkpoint, by source and epoch: rows, and the sum of their hashes."""
        from data_pipeline.stream.counters import add, from_json
        from train.checkpoint.format.verify import read_manifest
        from train.checkpoint.stores.local import LocalFolder

        states = read_manifest(LocalFolder(self.checkpoint(step)))[0].rank_states
        return add(*(from_json(state["counters"]) for state in states))


def resume_point(source: Trial, target: Trial, before: int) -> int:
    """Give `target` the newest checkpoint of `source` up to a step to start from; its step."""
    step = newest_checkpoint(source.folder, before)
    target.checkpoint(step).parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source.checkpoint(step), target.checkpoint(step))
    return step


def newest_checkpoint(run: Path, before: int) -> int:
    names = [re.fullmatch(r"step-(\d+)", folder.name) for folder in (run / "checkpoints").glob("step-*")]
    steps = [int(name[1]) for name in names if name and int(name[1]) <= before]
    if not steps:
        raise LaunchError(f"{run} has no checkpoint of step {before} or an earlier one to start from")
    return max(steps)


def world_size(run: Path) -> int:
    started = [event for event in read_jsonl(run / "events.jsonl") if event["kind"] == "started"]
    if not started:
        raise LaunchError(f"{run / 'events.jsonl'} does not tell how many ranks the run had")
    return started[-1]["world_size"]


def command(env: Mapping[str, str], ranks: int, attempt: int, one_node: bool) -> list[str]:
    """What starts a run: `keepstep run` here, or by srun on all nodes of this Slurm allocation."""
    here = [sys.executable, "-P", "-m", "launch.cli", "run", "--ranks", str(ranks)]
    nodes = int(env.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes == 1 or one_node:
        return here
    port = 20000 + (int(env["SLURM_JOB_ID"]) * 17 + attempt) % 10000
    srun = ["srun", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    return [*srun, *here, "--nodes", str(nodes), "--head", f"{_first_node(env['SLURM_JOB_NODELIST'])}:{port}"]


def _first_node(nodes: str) -> str:
    """Its address: its name may mean 127.0.1.1 there."""

    def ask(*words: str) -> str:
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=True).stdout

    name = ask("show", "hostnames", nodes).split()[0]
    found = re.search(r"NodeAddr=(\S+)", ask("--oneliner", "show", "node", name))
    return found[1] if found else name
