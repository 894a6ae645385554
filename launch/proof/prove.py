"""Proves on the user's own recipe and machine that a run resumes exactly.

One run is undisturbed. Another one, with the same layout, has faults injected at random moments: a rank is killed, all
ranks are killed, one is killed during a save, a checkpoint is damaged, the run is stopped. It must end with the same
losses, samples, weights and moments, bit for bit. Further runs resume in the middle under other engines and numbers of
ranks. They must train on the same samples, and their losses must stay within a tolerance.
"""

import json
import os
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from launch.proof.plan import draw_faults, few_steps, save_every
from launch.proof.report import Report
from launch.proof.trial import Trial, copy_resume_point
from train.config import Recipe
from train.config_file import load_recipe


@dataclass(frozen=True, kw_only=True)
class ProofOptions:
    """What to prove; the options of `keepstep prove`."""

    recipe: str
    overrides: Sequence[str]
    out: Path
    """Folder for the runs and the report."""
    ranks: int
    """Processes on this machine, or on each node of a Slurm allocation."""
    steps: int
    faults: Sequence[str]
    """Kinds of fault (`launch.proof.plan.KINDS`)."""
    seed: int
    """Seed of the moments of the faults."""
    layouts: Sequence[tuple[str, int]]
    """Other engines and numbers of ranks under which the run resumes."""
    tolerance: float
    """Largest relative difference of a loss under another layout."""


def prove(options: ProofOptions) -> Report:
    """Run the trials, write report.json and report.txt, and return the report. ConfigError or LaunchError."""
    recipe = load_recipe(options.recipe, options.overrides)
    every = save_every(options.steps)
    out, steps = options.out, options.steps
    out.mkdir(parents=True, exist_ok=True)
    settings = [*options.overrides, *few_steps(recipe, steps, every), f"runs_dir={out / 'runs'}"]
    report = Report(_facts(options, recipe))

    undisturbed = Trial(options.recipe, "undisturbed", out, settings, options.ranks)
    disturbed = Trial(options.recipe, "disturbed", out, settings, options.ranks)
    undisturbed.train([], 0)
    world_size = undisturbed.world_size()
    report.faults = draw_faults(options.faults, world_size, steps, every, random.Random(options.seed))
    disturbed.train(report.faults, max_restarts=len(report.faults) + 2)
    check_bits(report, undisturbed, disturbed, steps)
    for engine, ranks in options.layouts:
        other = Trial(
            options.recipe, f"{engine}-{ranks}", out, [*settings, f"parallel.engine={engine}"], ranks, one_node=True
        )
        start = copy_resume_point(undisturbed, other, steps // 2)
        other.train([], 0)
        check_layout(report, undisturbed, other, start, steps, options.tolerance)
    (out / "report.json").write_text(json.dumps(report.as_json(), indent=2))
    (out / "report.txt").write_text(report.as_text())
    return report


def check_bits(report: Report, one: Trial, two: Trial, steps: int) -> None:
    """Add the claims about two runs with the same layout: faults injected, and every bit equal."""
    injected, wanted = two.injected_faults(), len(report.faults)
    detail = f"{injected} of {wanted}, in {two.attempts()} attempts"
    report.add("every fault was injected", injected == wanted, detail)
    first, second = one.curve("loss", "grad_norm"), two.curve("loss", "grad_norm")
    wrong = [step for step in range(1, steps + 1) if first.get(step) != second.get(step) or step not in first]
    detail = f"{steps} steps, bit for bit" if not wrong else f"the steps {wrong} differ"
    report.add("losses and gradient norms equal those of the undisturbed run", not wrong, detail)
    check_samples(report, one, two, steps)
    different, tensors = one.differences(two, steps), one.tensors(steps)
    detail = f"{tensors} tensors, bit for bit" if not different else "; ".join(different[:5])
    report.add("weights and moments equal those of the undisturbed run", not different, detail)


def check_samples(report: Report, one: Trial, two: Trial, steps: int) -> None:
    """Add the claim that two runs trained on the same samples."""
    first, second = one.samples(steps), two.samples(steps)
    rows = sum(number for number, _ in first.values())
    detail = f"{rows} rows of {len(first)} source epochs, by count and by the sum of their hashes"
    report.add(f"{two.name}: the samples equal those of the undisturbed run", first == second, detail)


def check_layout(report: Report, one: Trial, two: Trial, start: int, steps: int, tolerance: float) -> None:
    """Add the claims about a run that resumed at step `start` under another layout: same samples, close losses."""
    check_samples(report, one, two, steps)
    first, second = one.curve("loss"), two.curve("loss")
    apart = [abs(second[s][0] - first[s][0]) / abs(first[s][0]) for s in range(start + 1, steps + 1) if s in second]
    complete = len(apart) == steps - start
    largest = max(apart, default=0.0)
    detail = f"steps {start + 1} to {steps}: relative difference at most {largest:.2e}, tolerance {tolerance:g}"
    report.add(f"{two.name}: the losses continue within the tolerance", complete and largest <= tolerance, detail)


def _facts(options: ProofOptions, recipe: Recipe) -> dict[str, Any]:
    return {
        "recipe": " ".join([options.recipe, *options.overrides]),
        "engine": f"{recipe.parallel.engine}, {recipe.parallel.precision}, {options.ranks} ranks a node",
        "steps": options.steps,
        "seed": options.seed,
        "machine": f"{platform.node()}, {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": ", ".join(f"{name} {version(name)}" for name in ("keepstep", "torch", "numpy")),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
