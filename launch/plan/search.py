"""All layouts of a recipe that fit, the best first; and what a layout takes on other numbers of GPUs."""

import itertools
from collections.abc import Iterator
from typing import Any

from launch.plan.estimate import Assumptions, Plan, memory_of, plan_recipe
from launch.plan.machine import Machine
from parallel.errors import LaunchError
from train.config import Recipe
from train.errors import ConfigError

Setting = dict[str, Any]
"""Settings that differ from the recipe's, by dotted name."""
MICRO_BATCHES = (1, 2, 4, 8, 16)
CHECKPOINTING = ("none", "selective", "full")
REFUSALS = (ValueError, ConfigError, LaunchError)
"""How a recipe refuses settings. ValueError is pydantic's, by the recipe's own rules."""


def search(
    recipe: Recipe, gpus: int, machine: Machine, assumptions: Assumptions, tokens: float | None = None
) -> list[tuple[Setting, Plan]]:
    """The layouts that fit, by days that the run really takes. The global batch size stays as it is."""
    found = [
        (setting, plan)
        for setting in candidates(gpus, machine)
        if (plan := try_setting(recipe, setting, gpus, machine, assumptions, tokens)) is not None and plan.fits
    ]
    return sorted(found, key=lambda entry: entry[1].days)


def try_setting(
    recipe: Recipe, setting: Setting, gpus: int, machine: Machine, assumptions: Assumptions, tokens: float | None
) -> Plan | None:
    """The plan with other settings; None if the recipe refuses them."""
    try:
        return plan_recipe(with_setting(recipe, setting), gpus, machine, assumptions, tokens)
    except REFUSALS:
        return None


def with_setting(recipe: Recipe, setting: Setting) -> Recipe:
    """The recipe with other settings. ValueError if the recipe refuses them."""
    sections: dict[str, dict[str, Any]] = recipe.model_dump()
    for name, value in setting.items():
        section, key = name.split(".")
        sections[section][key] = value
    return Recipe.model_validate(sections)


def candidates(gpus: int, machine: Machine) -> Iterator[Setting]:
    """Settings to try: every engine, with tensor parallelism within a domain."""
    widths = [2**power for power in range(7) if 2**power <= min(machine.domain, gpus)]
    for tensor, micro_batch, checkpointing in itertools.product(widths, MICRO_BATCHES, CHECKPOINTING):
        common = {
            "parallel.tensor": tensor,
            "train.micro_batch_size": micro_batch,
            "parallel.activation_checkpointing": checkpointing,
            "parallel.checkpoint_every_k_blocks": 1,
            "parallel.replicate": 1,
            "parallel.shard": -1,
            "parallel.reshard_after_forward": True,
            "parallel.reduce_every_micro_batch": True,
            "parallel.cpu_offload": False,
        }
        for engine in ("ddp", "fsdp2", "zero1", "zero2", "zero3"):
            if tensor == 1 or engine in ("ddp", "fsdp2"):
                yield {"parallel.engine": engine, **common}
        ranks = gpus // tensor
        for shard in (machine.domain // tensor, 4 * machine.domain // tensor, 16 * machine.domain // tensor):
            if 1 < shard < ranks and ranks % shard == 0:  # HSDP
                replicas = {"parallel.replicate": ranks // shard, "parallel.shard": shard}
                yield {"parallel.engine": "fsdp2", **common, **replicas}


def what_would_fit(recipe: Recipe, gpus: int, domain: int = 8) -> list[tuple[Setting, float]]:
    """The three changes of one setting that save most memory, with the bytes that each saves.

    `domain`: most ranks over which tensor parallelism is worth its exchanges."""
    now = memory_of(recipe, gpus).total
    widths = {2 * recipe.parallel.tensor, 8}
    changes: list[Setting] = [
        {"parallel.activation_checkpointing": "full"},
        {"train.micro_batch_size": max(1, recipe.train.micro_batch_size // 2)},
        {"parallel.engine": "fsdp2"},
        {"parallel.reduce_every_micro_batch": True},
        *({"parallel.tensor": width} for width in sorted(widths) if width <= domain),
    ]
    saved: list[tuple[Setting, float]] = []
    for setting in changes:
        try:
            saved.append((setting, now - memory_of(with_setting(recipe, setting), gpus).total))
        except REFUSALS:
            continue
    return sorted((entry for entry in saved if entry[1] > 0), key=lambda entry: -entry[1])[:3]


def scale_curve(
    recipe: Recipe, machine: Machine, assumptions: Assumptions, tokens: float | None, largest: int = 16_384
) -> list[tuple[int, Plan]]:
    """The recipe on 8, 16, 32, ... GPUs, as far as its batch divides. Layouts that shard everything stay so."""
    found: list[tuple[int, Plan]] = []
    gpus = 8
    while gpus <= largest:
        try:
            found.append((gpus, plan_recipe(recipe, gpus, machine, assumptions, tokens)))
        except (ConfigError, LaunchError):
            pass
        gpus *= 2
    return found
