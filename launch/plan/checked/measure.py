"""A few real steps of a recipe on this machine, beside the plan: `keepstep plan RECIPE --measure`.

The run is a process of its own with a scratch folder, which is removed. It saves only after the last step, whose memory
is not counted. Without the recipe's data sets it trains on a small one made of Python's documentation.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.doctor.measure import as_machine, measure
from launch.plan.estimate import Assumptions, Plan, plan_recipe
from launch.plan.machine import Machine
from launch.supervise.local import Node, environment
from launch.terminal import duration, print_table, size
from parallel.environ import read_world
from parallel.errors import LaunchError
from train.config import Recipe
from train.config_file import recipe_as_yaml
from train.records.jsonl import read_jsonl
from train.run_folder import RunFolder

STEPS = 6
"""Steps of the run. The fastest after the first counts: other work on the machine slows the others."""
CORPUS_BYTES = 400_000
VOCABULARY = 512
"""Sizes of the data set that stands in for a missing one."""


@dataclass(frozen=True)
class Comparison:
    """What was planned for a run, and what it took."""

    plan: Plan
    peak_bytes: float
    """Most memory of a rank: of its GPU, or of its process on a CPU."""
    step_seconds: float

    @property
    def errors(self) -> tuple[float, float]:
        """(planned - measured) / measured, of memory and of time."""
        return self.plan.memory.total / self.peak_bytes - 1, self.plan.step.total / self.step_seconds - 1


def compare(recipe: Recipe, ranks: int) -> Comparison:
    """Measure the machine, plan the recipe for it, and run it. LaunchError if the run fails."""
    with tempfile.TemporaryDirectory(prefix="keepstep-plan-") as scratch:
        machine = machine_here(Path(scratch), ranks)
        plan = plan_recipe(recipe, ranks, machine, Assumptions())
        return Comparison(plan, *run_steps(recipe, ranks, Path(scratch)))


def machine_here(folder: Path, ranks: int) -> Machine:
    """This machine by the doctor's figures, as one of `ranks` ranks sees it."""
    import torch

    from train.model.kernels.linear import SLOW

    threads = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or environment(Node(ranks), {})["OMP_NUM_THREADS"]))
    try:
        figures = measure(folder, read_world({}))
    finally:
        torch.set_num_threads(threads)
    machine = as_machine(figures, has_16_bits=bool(figures["devices"]) or not SLOW)
    if machine["cpu"]:
        machine["memory_tb_s"] /= ranks
    return Machine.model_validate(machine)


def run_steps(recipe: Recipe, ranks: int, scratch: Path, steps: int = STEPS) -> tuple[float, float]:
    """Train a few steps on so many ranks; return the peak memory in bytes and the seconds of the fastest step."""
    shortened = _shortened(recipe, scratch, steps)
    file = scratch / "recipe.yaml"
    file.write_text(recipe_as_yaml(shortened), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "launch.cli", "run", str(file), "--ranks", str(ranks), "--max-restarts", "0"]
    done = subprocess.run([*command, "--force"], capture_output=True, text=True, check=False)
    records = [record for record in _metrics(shortened) if "loss" in record]
    if done.returncode or len(records) < 2:
        last = [line for line in done.stderr.splitlines() if line.startswith("keepstep:")] or done.stderr.splitlines()
        raise LaunchError(f"the measured run failed: {last[-1] if last else f'exit code {done.returncode}'}")
    tokens = shortened.train.global_batch_size * shortened.model.seq_len
    return records[-1]["memory_gib"] * 2**30, min(tokens / record["tokens_per_second"] for record in records[1:])


def _metrics(recipe: Recipe) -> list[dict[str, Any]]:
    path = RunFolder.of(recipe).metrics
    return list(read_jsonl(path)) if path.exists() else []


def _shortened(recipe: Recipe, scratch: Path, steps: int) -> Recipe:
    """The recipe with few steps, without evaluations and saves, in the scratch folder."""
    document = recipe.model_dump()
    document |= {"name": "measured", "runs_dir": str(scratch / "runs")}
    document["train"] |= {"steps": steps, "eval_every": 0, "eval_sequences": 0, "tokens": None, "epochs": None}
    document["optim"] |= {"warmup_steps": 0, "schedule": "cosine"}
    document["checkpoint"] |= {"every": steps, "local_dir": None, "keep_best": 0}
    if not all("://" in source.path or Path(source.path).is_dir() for source in recipe.data.sources):
        document["data"]["sources"] = [{"path": str(_small_data(scratch, recipe.model.seq_len))}]
    return Recipe.model_validate(document)


def _small_data(scratch: Path, seq_len: int) -> Path:
    from data_pipeline.build.prepare import BuildOptions, build_dataset
    from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
    from launch.corpus import gather

    corpus = scratch / "corpus.jsonl"
    gather(corpus, CORPUS_BYTES)
    texts = [json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines()]
    train_sentencepiece(texts, scratch / "tokenizer", vocab_size=VOCABULARY)
    build_dataset([str(corpus)], scratch / "data", scratch / "tokenizer", BuildOptions(seq_len=seq_len))
    return scratch / "data"


def print_comparison(found: Comparison) -> None:
    """Print the plan and the measured figures side by side."""
    memory_error, time_error = found.errors
    rows = [
        ["peak memory of a rank", size(found.plan.memory.total), size(found.peak_bytes), f"{memory_error:+.1%}"],
        ["fastest step", duration(found.plan.step.total), duration(found.step_seconds), f"{time_error:+.1%}"],
    ]
    print_table((f"{found.plan.arrangement.gpus} ranks on this machine", ">plan", ">measured", ">error"), rows)
    print(f"the plan's memory is fullest in {found.plan.memory.moment}; other work on the machine slows the run")
