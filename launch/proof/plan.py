"""What `keepstep prove` runs: a short version of the recipe, the faults, the other layouts."""

import random
from collections.abc import Sequence
from typing import Any

from train.config import Recipe
from train.errors import ConfigError

KINDS = ("rank", "group", "save", "torn", "stop")
"""Faults to choose from: one rank killed, all killed, one killed during a save, a damaged checkpoint, a stop."""
PHASES = ("data", "forward", "update")


def save_every(steps: int) -> int:
    """Return the steps between checkpoints in a run of so many steps. ConfigError if the run is too short."""
    every = max(1, steps // 4)
    if steps < 4 * every or steps < 8:
        raise ConfigError(f"--steps ({steps}) must be at least 8, for several checkpoints")
    return every


def few_steps(recipe: Recipe, steps: int, every: int) -> list[str]:
    """Return the overrides that make a short run of a recipe for a long one, saved every `every` steps."""
    warmup = min(recipe.optim.warmup_steps, steps // 2)
    decay = [f"optim.decay_steps={max(1, steps // 4)}"] if recipe.optim.decay_steps else []
    return [
        f"train.steps={steps}",
        "train.max_seconds=null",
        "train.log_every=1",
        f"train.eval_every={every}",
        f"train.eval_sequences={min(recipe.train.eval_sequences, 64)}",
        f"optim.warmup_steps={warmup}",
        f"checkpoint.every={every}",
        f"checkpoint.keep_last={steps}",
        *decay,
    ]


def parse_layout(text: str) -> tuple[str, int]:
    """Return engine and number of ranks of `ENGINE:RANKS`. ConfigError if the text does not read so."""
    engine, _, ranks = text.partition(":")
    if not ranks.isdecimal() or not 1 <= int(ranks) <= 4096:
        raise ConfigError(f"--also {text} must be ENGINE:RANKS, such as ddp:1")
    return engine, int(ranks)


def draw_faults(
    kinds: Sequence[str], world_size: int, steps: int, every: int, dice: random.Random
) -> list[dict[str, Any]]:
    """Return faults of these kinds at random ranks, steps and phases. ConfigError for an unknown kind.

    A checkpoint is damaged only after the third save has begun: then two are complete, even if a save is still running
    in the background."""
    faults: list[tuple[str, int, int, str]] = []
    for kind in kinds:
        step, rank, phase = dice.randrange(1, steps), dice.randrange(world_size), dice.choice(PHASES)
        step_of_save = every * dice.randrange(1, steps // every)
        step_with_two_saved = dice.randrange(3 * every + 1, steps)
        match kind:
            case "rank":
                faults.append(("kill", rank, step, phase))
            case "group":
                faults += [("kill", each, step, phase) for each in range(world_size)]
            case "save":
                faults.append(("kill_in_write", rank, step_of_save, "save"))
            case "torn":
                damage = dice.choice(["truncated_shard", "flipped_shard", "missing_shard"])
                faults.append((damage, 0, step_with_two_saved, phase))
            case "stop":
                faults.append(("term", rank, step, phase))
            case _:
                raise ConfigError(f"--faults: {kind} is not one of {', '.join(KINDS)}")
    return [dict(zip(("fault", "rank", "step", "phase"), fault, strict=True)) for fault in faults]
