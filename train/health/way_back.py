"""Where a diverged run can go back to: the last checkpoint before its losses went bad, and the commands."""

import math
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from train.checkpoint.stores.steps import committed_steps, step_name
from train.config import Recipe
from train.health.guard import DEAD_NORM
from train.records.curve import clean_curve
from train.run_folder import RunFolder


def last_good_step(curve: Mapping[int, Mapping[str, Any]], saved: Iterable[int]) -> int | None:
    """Return the newest saved step whose loss is nearer to the lowest loss of the run than to its first one.

    `curve`: record of each step. The loss after a checkpoint was computed with its weights, so that one must be known
    and good too. None if there is no such step."""
    losses = {step: float(record["loss"]) for step, record in curve.items() if _learns(record)}
    if not losses:
        return None
    highest = (losses[min(losses)] + min(losses.values())) / 2
    good = [step for step in saved if max(losses.get(s, math.inf) for s in (step, step + 1)) <= highest]
    return max(good, default=None)


def way_back(recipe: Recipe) -> str:
    """Return how to continue a diverged run from the last checkpoint before its losses went bad, as one sentence."""
    folder = RunFolder.of(recipe)
    step = last_good_step(clean_curve(folder.metrics, ("loss", "grad_norm")), committed_steps(folder.checkpoints))
    rate = f"optim.lr={recipe.optim.lr / 2:g}"
    if step is None:
        return f"No checkpoint is from before the losses went bad: start a new run with a lower rate, such as {rate}"
    name = f"{recipe.name}-from-{step}"
    source, target = folder.checkpoints / step_name(step), Path(recipe.runs_dir) / name / "checkpoints"
    quoted = [shlex.quote(str(path)) for path in (source, target, folder.recipe)]
    return (
        f"Step {step} is the last checkpoint before the losses went bad; to continue from it in a new run: "
        f"`keepstep checkpoint copy {quoted[0]} {quoted[1]}`, then "
        f"`keepstep run {quoted[2]} name={name} {rate} --allow schedule`"
    )


def _learns(record: Mapping[str, Any]) -> bool:
    loss, norm = record.get("loss", math.nan), record.get("grad_norm", math.nan)
    return math.isfinite(loss) and math.isfinite(norm) and norm > DEAD_NORM
