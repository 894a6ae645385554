"""`keepstep prove RECIPE`: train, kill, resume and compare, on the user's own recipe and machine.

    keepstep prove recipes/laptop.yaml --ranks 2 --also ddp:1 --also zero3:2
    keepstep prove --replay runs/laptop --step 40      # train that step again and compare its bits

One run goes undisturbed. Another one, with the same layout, meets every fault that is asked for at random instants: a
rank or all of them killed, one killed while it writes a checkpoint, a torn file, a stop. It must end with the same
losses, samples, weights and moments, bit for bit. With `--also`, the run goes on from the middle under other engines
and numbers of ranks: the same samples, and losses that differ by no more than the tolerance.

The report is report.txt and report.json in the output folder. In a Slurm allocation of several nodes the runs are
started with srun on all of them.
"""

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from launch.proof.trial import Trial, resume_point
from train.config import Recipe
from train.config_file import load_recipe
from train.errors import ConfigError
from train.exit_codes import FAILED, FINISHED

KINDS = ("rank", "group", "save", "torn", "stop")
PHASES = ("data", "forward", "update")


@dataclass
class Check:
    claim: str
    passed: bool
    detail: str


@dataclass
class Report:
    facts: dict[str, Any]
    faults: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def add(self, claim: str, passed: bool, detail: str) -> None:
        self.checks.append(Check(claim, passed, detail))
        print(f"{'holds' if passed else 'FAILS'}: {claim}: {detail}", flush=True)

    def as_json(self) -> dict[str, Any]:
        checks = [asdict(check) for check in self.checks]
        return {"passed": self.passed, **self.facts, "faults": self.faults, "checks": checks}

    def as_text(self) -> str:
        lines = ["Proof of continuation by Keepstep", ""]
        lines += [f"{name:<12} {value}" for name, value in self.facts.items()]
        lines += ["", "Faults on the way:"] if self.faults else []
        lines += [f"  {f['fault']} on rank {f['rank']} after step {f['step']}, in {f['phase']}" for f in self.faults]
        lines += ["", "Claims:"]
        for check in self.checks:
            lines += [f"  [{'holds' if check.passed else 'FAILS'}] {check.claim}", f"          {check.detail}"]
        return "\n".join([*lines, "", "PASSED" if self.passed else "FAILED", ""])


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="the recipe's YAML file")
    parser.add_argument("overrides", nargs="*", help="settings that replace the recipe's, such as model.n_layers=2")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine, or on each node (default 2)")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps (default 12)")
    parser.add_argument("--faults", default=",".join(KINDS), help=f"which of {','.join(KINDS)} (default all)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants of the faults")
    parser.add_argument("--also", action="append", default=[], metavar="ENGINE:RANKS", help="go on under this layout")
    parser.add_argument("--tolerance", type=float, default=0.01, help="of the loss under other layouts, relative")
    parser.add_argument("--out", type=Path, help="where runs and report go (default: a new folder runs/prove-TIME)")
    parser.add_argument("--replay", type=Path, metavar="RUN", help="train a step of this run again instead")
    parser.add_argument("--step", type=int, help="with --replay: which step")


def run(options: argparse.Namespace) -> int:
    out: Path = options.out or Path("runs") / time.strftime("prove-%Y%m%d-%H%M%S")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out ({out}) is not empty; remove it or name another folder")
    if options.replay is not None:
        from launch.proof.replay import replay

        return replay(options.replay, options.step, out)
    if options.recipe is None:
        raise ConfigError("give a recipe, or --replay RUN --step N")
    recipe = load_recipe(options.recipe, options.overrides)
    others = [parse_layout(text) for text in options.also]
    every = max(1, options.steps // 4)
    check_steps(options.steps, every)
    out.mkdir(parents=True, exist_ok=True)
    settings = [*options.overrides, *few_steps(recipe, options.steps, every), f"runs_dir={out / 'runs'}"]
    report = Report(facts_of(options, recipe))

    undisturbed = Trial(options.recipe, "undisturbed", out, settings, options.ranks)
    disturbed = Trial(options.recipe, "disturbed", out, settings, options.ranks)
    undisturbed.train([], 0)
    world_size = undisturbed.world_size()
    kinds = [kind for kind in options.faults.split(",") if kind]
    report.faults = draw(kinds, world_size, options.steps, every, random.Random(options.seed))
    disturbed.train(report.faults, max_restarts=len(report.faults) + 2)
    compare_bits(report, undisturbed, disturbed, options.steps)
    for engine, ranks in others:
        other = Trial(
            options.recipe, f"{engine}-{ranks}", out, [*settings, f"parallel.engine={engine}"], ranks, one_node=True
        )
        middle = resume_point(undisturbed, other, options.steps // 2)
        other.train([], 0)
        compare_layouts(report, undisturbed, other, middle, options.steps, options.tolerance)
    (out / "report.json").write_text(json.dumps(report.as_json(), indent=2))
    (out / "report.txt").write_text(report.as_text())
    print(f"\n{report.as_text()}\n{out / 'report.txt'}")
    return FINISHED if report.passed else FAILED


def check_steps(steps: int, every: int) -> None:
    if steps < 4 * every or steps < 8:
        raise ConfigError(f"--steps ({steps}) must be at least 8, for several checkpoints")


def few_steps(recipe: Recipe, steps: int, every: int) -> list[str]:
    """Overrides that make a short run of a recipe for a long one."""
    warmup = min(recipe.optim.warmup_steps, steps // 2)
    decay = [f"optim.decay_steps={max(1, steps // 4)}"] if recipe.optim.decay_steps else []
    return [
        f"train.steps={steps}",
        "train.log_every=1",
        f"train.eval_every={every}",
        f"train.eval_sequences={min(recipe.train.eval_sequences, 64)}",
        f"optim.warmup_steps={warmup}",
        f"checkpoint.every={every}",
        f"checkpoint.keep_last={steps}",
        *decay,
    ]


def parse_layout(text: str) -> tuple[str, int]:
    engine, _, ranks = text.partition(":")
    if not ranks.isdigit() or int(ranks) < 1:
        raise ConfigError(f"--also {text} must be ENGINE:RANKS, such as ddp:1")
    return engine, int(ranks)


def draw(kinds: Sequence[str], world_size: int, steps: int, every: int, dice: random.Random) -> list[dict[str, Any]]:
    """Faults of these kinds at random ranks, steps and phases.

    A checkpoint is harmed only after the third save has begun: then two are complete, whatever goes on behind."""
    faults = []
    for kind in kinds:
        step, rank, phase = dice.randrange(1, steps), dice.randrange(world_size), dice.choice(PHASES)
        saving = every * dice.randrange(1, steps // every)
        late = dice.randrange(3 * every, steps)
        match kind:
            case "rank":
                faults.append(("kill", rank, step, phase))
            case "group":
                faults += [("kill", each, step, phase) for each in range(world_size)]
            case "save":
                faults.append(("kill_in_write", rank, saving, "save"))
            case "torn":
                faults.append((dice.choice(["truncated_shard", "flipped_shard", "missing_shard"]), 0, late, phase))
            case "stop":
                faults.append(("term", rank, step, phase))
            case _:
                raise ConfigError(f"--faults: {kind} is none of {', '.join(KINDS)}")
    return [dict(zip(("fault", "rank", "step", "phase"), fault, strict=True)) for fault in faults]


def compare_bits(report: Report, one: Trial, two: Trial, steps: int) -> None:
    """Of two runs with the same layout."""
    struck, asked = two.struck(), len(report.faults)
    report.add("every fault struck", struck == asked, f"{struck} of {asked}, in {two.attempts()} attempts")
    first, second = one.curve("loss", "grad_norm"), two.curve("loss", "grad_norm")
    wrong = [step for step in range(1, steps + 1) if first.get(step) != second.get(step) or step not in first]
    detail = f"{steps} steps, bit for bit" if not wrong else f"the steps {wrong} differ"
    report.add("losses and gradient norms are those of the undisturbed run", not wrong, detail)
    compare_samples(report, one, two, steps)
    different, tensors = one.differences(two, steps), one.tensors(steps)
    detail = f"{tensors} tensors, bit for bit" if not different else "; ".join(different[:5])
    report.add("weights and moments are those of the undisturbed run", not different, detail)


def compare_samples(report: Report, one: Trial, two: Trial, steps: int) -> None:
    first, second = one.samples(steps), two.samples(steps)
    rows = sum(number for number, _ in first.values())
    detail = f"{rows} rows of {len(first)} source epochs, by count and by the sum of their hashes"
    report.add(f"{two.name}: the samples are those of the undisturbed run", first == second, detail)


def compare_layouts(report: Report, one: Trial, two: Trial, middle: int, steps: int, tolerance: float) -> None:
    compare_samples(report, one, two, steps)
    first, second = one.curve("loss"), two.curve("loss")
    apart = [abs(second[s][0] - first[s][0]) / abs(first[s][0]) for s in range(middle + 1, steps + 1) if s in second]
    whole = len(apart) == steps - middle
    detail = f"steps {middle + 1} to {steps}, apart by {max(apart, default=0.0):.2e} at most, tolerance {tolerance:g}"
    report.add(f"{two.name}: the losses go on", whole and max(apart) <= tolerance, detail)


def facts_of(options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    return {
        "recipe": " ".join([options.recipe, *options.overrides]),
        "engine": f"{recipe.parallel.engine}, {recipe.parallel.precision}, {options.ranks} ranks a node",
        "steps": options.steps,
        "seed": options.seed,
        "machine": f"{platform.node()}, {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": ", ".join(f"{name} {version(name)}" for name in ("keepstep", "torch", "numpy")),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
