"""The plan beside real runs on this machine's CPU: `python -m bench.planning.measured`; with --run, run them first.

The runs' figures are kept in bench/published/measured.csv with the machine's, so that the plan can be compared again
without running anything.
"""

import argparse
import csv
import json
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.plan.checked.measure import machine_here, run_steps
from launch.plan.estimate import Assumptions, Plan, plan_recipe
from launch.plan.machine import Machine
from train.config import Recipe
from train.config_file import load_recipe

FILE = Path(__file__).parents[1] / "published" / "measured.csv"
RECIPE = Path(__file__).parents[2] / "recipes" / "laptop.yaml"
STEPS = 2
MODEL = (
    "model.vocab_size=8192",
    "model.d_model=384",
    "model.n_layers=6",
    "model.n_heads=6",
    "model.seq_len=256",
    "train.global_batch_size=8",
    "parallel.device=cpu",
)
"""A model of 14 million parameters: large enough that its memory exceeds that of the libraries."""
CONFIGURATIONS = (
    (1, "engine=single precision=fp32 activation_checkpointing=none"),
    (1, "engine=single precision=fp32 activation_checkpointing=selective"),
    (1, "engine=single precision=fp32 activation_checkpointing=full"),
    (1, "engine=single precision=bf16 activation_checkpointing=none"),
    (2, "engine=ddp precision=fp32 activation_checkpointing=none"),
    (2, "engine=fsdp2 precision=fp32 activation_checkpointing=none"),
    (2, "engine=fsdp2 precision=bf16 activation_checkpointing=full"),
    (2, "engine=zero1 precision=bf16 activation_checkpointing=none"),
    (2, "engine=zero2 precision=bf16 activation_checkpointing=none"),
    (2, "engine=zero3 precision=bf16 activation_checkpointing=none"),
    (2, "engine=fsdp2 tensor=2 precision=fp32 activation_checkpointing=none"),
    (4, "engine=fsdp2 precision=fp32 activation_checkpointing=full"),
)


@dataclass(frozen=True)
class Measured:
    """A real run."""

    ranks: int
    settings: str
    peak_bytes: float
    step_seconds: float
    machine: Machine
    """What one of the ranks saw of the machine."""
    cpu: str

    @property
    def recipe(self) -> Recipe:
        """The recipe that was run."""
        return recipe_of(self.settings, self.ranks)

    @property
    def plan(self) -> Plan:
        """The plan for it."""
        return plan_recipe(self.recipe, self.ranks, self.machine, Assumptions())


def recipe_of(settings: str, ranks: int) -> Recipe:
    """The recipe of one configuration. A step has two micro batches on each rank."""
    words = [f"parallel.{word}" for word in settings.split()]
    data_ranks = ranks // 2 if "tensor=2" in settings else ranks
    return load_recipe(RECIPE, [*MODEL, f"train.micro_batch_size={4 // data_ranks}", *words])


def run_all(chosen: str) -> Iterator[Measured]:
    """Run the configurations whose settings contain `chosen`, one after the other."""
    for ranks, settings in CONFIGURATIONS:
        if chosen not in settings:
            continue
        with tempfile.TemporaryDirectory(prefix="keepstep-measured-") as scratch:
            machine = machine_here(Path(scratch), ranks)
            peak, seconds = run_steps(recipe_of(settings, ranks), ranks, Path(scratch), STEPS)
        yield Measured(ranks, settings, peak, seconds, machine, _cpu())


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text("ascii", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def read_measured(path: Path = FILE) -> list[Measured]:
    """The runs that were recorded."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Measured(
                int(line["ranks"]),
                line["settings"],
                float(line["peak_bytes"]),
                float(line["step_seconds"]),
                Machine.model_validate(json.loads(line["machine"])),
                line["cpu"],
            )
            for line in csv.DictReader(file)
        ]


def write_measured(runs: list[Measured], path: Path = FILE) -> None:
    """Record the runs."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("ranks", "settings", "peak_bytes", "step_seconds", "machine", "cpu"))
        for run in runs:
            machine = json.dumps(run.machine.model_dump())
            writer.writerow(
                (run.ranks, run.settings, f"{run.peak_bytes:.0f}", f"{run.step_seconds:.4f}", machine, run.cpu)
            )


def memory_table(runs: list[Measured]) -> list[str]:
    """Lines of a Markdown table of peak memory, as in docs/planning.md."""
    lines = ["| ranks | parallel | plan | measured | error |", "| --- | --- | --- | --- | --- |"]
    for run in runs:
        settings, memory = run.settings.replace("activation_checkpointing=", "recompute "), run.plan.memory.total
        measured, error = run.peak_bytes / 2**30, memory / run.peak_bytes - 1
        lines.append(f"| {run.ranks} | {settings} | {memory / 2**30:.2f} GiB | {measured:.2f} GiB | {error:+.1%} |")
    return lines


def print_times(runs: list[Measured]) -> None:
    """Print the time of a step, planned and measured, and the speed of products when it was measured."""
    for run in runs:
        gflops = run.machine.best(run.recipe.parallel.precision) / 1e9
        times = f"planned {run.plan.step.total:.1f} s, measured {run.step_seconds:.1f} s"
        print(f"ranks {run.ranks}, {run.settings}: {times} (products at {gflops:.0f} GFLOP/s)")


def main() -> None:
    """Run if asked to; then print memory and times."""
    parser = argparse.ArgumentParser(prog="python -m bench.planning.measured", description=__doc__)
    parser.add_argument("--run", action="store_true", help="run the configurations and record them")
    parser.add_argument("--only", default="", metavar="WORDS", help="with --run: those whose settings have these words")
    options = parser.parse_args()
    recorded = read_measured() if FILE.exists() else []
    if options.run:
        for run in run_all(options.only):
            others = [one for one in recorded if (one.ranks, one.settings) != (run.ranks, run.settings)]
            order = {configuration: index for index, configuration in enumerate(CONFIGURATIONS)}
            recorded = sorted([*others, run], key=lambda one: order.get((one.ranks, one.settings), len(order)))
            write_measured(recorded)
    print("\n".join(memory_table(recorded)), end="\n\n")
    print_times(recorded)


if __name__ == "__main__":
    main()
