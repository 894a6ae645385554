"""Whether a run fits its devices, in one line, before it starts; and what its ranks need to explain full memory."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from launch.plan.activations import Backend
from launch.plan.checked.devices import Device
from launch.plan.estimate import Assumptions, memory_of, plan_recipe
from launch.plan.memory import Memory
from launch.plan.report import overrides
from launch.plan.search import what_would_fit
from launch.supervise.local import Node
from launch.terminal import duration
from parallel.errors import LaunchError
from train.checkpoint.stores.steps import newest_step
from train.config import Recipe
from train.errors import ConfigError
from train.health.exhausted import PLAN_VARIABLE
from train.run_folder import RunFolder

MARGIN = 0.1
"""A run is refused if the plan exceeds the memory by more than this share. The plan's own error is smaller
(docs/planning.md)."""
GIB = 2**30
CPUINFO = Path("/proc/cpuinfo")


def verdict(recipe: Recipe, ranks: int, device: Device) -> str:
    """Whether the run fits, by how much, and how long it takes, in one line."""
    needed = memory_of(recipe, ranks).total
    memory = device.machine.memory_bytes if device.machine else device.memory_bytes
    room = memory - needed
    fits = f"fits with {room / GIB:.1f} GiB to spare" if room >= 0 else f"may not fit: {-room / GIB:.1f} GiB too much"
    line = f"plan: {needed / GIB:.1f} of {memory / GIB:.1f} GiB on each of {ranks} x {device.name}, {fits}"
    if device.machine is None:
        return line
    try:
        plan = plan_recipe(recipe, ranks, device.machine, Assumptions())
    except ConfigError:  # the machine cannot multiply in this precision: the run says so itself
        return line
    return f"{line}; {duration(plan.step.total)} a step, {plan.days:.3g} days"


def refuse_what_cannot_fit(recipe: Recipe, ranks: int, device: Device, *, force: bool) -> None:
    """Raise LaunchError if even the least memory that the run can take is far above the device's."""
    found = memory_of(_leanest(recipe), ranks)
    if force or found.total <= (1 + MARGIN) * device.memory_bytes:
        return
    changes = [f"{overrides(setting)} saves {saved / GIB:.1f}" for setting, saved in what_would_fit(recipe, ranks)]
    largest = sorted(found.parts.items(), key=lambda part: -part[1])[:3]
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    raise LaunchError(
        f"the run needs {found.total / GIB:.1f} GiB on each {device.name}, which has {device.memory_bytes / GIB:.1f} "
        f"({listed}); {', '.join(changes) or 'use more ranks'}; add --force to start it all the same"
    )


def _leanest(recipe: Recipe) -> Recipe:
    """The recipe with the least that compiled blocks may keep, which only the compiler knows."""
    parallel = recipe.parallel
    if not parallel.compile or parallel.activation_checkpointing != "none":
        return recipe
    mode = "full" if parallel.activation_memory_budget < 1 else "selective"
    leaner = parallel.model_copy(update={"activation_checkpointing": mode})
    return recipe.model_copy(update={"parallel": leaner})


def check_before_run(
    recipe: Recipe, node: Node, device: Device | None, *, force: bool, on_gpus: bool
) -> dict[str, str]:
    """Print the verdict on the first node, and return the plan for the ranks' environment. {} if there is no plan.

    Raises LaunchError if the run cannot fit and has never saved a checkpoint. On CPUs nothing is printed."""
    ranks = node.ranks * node.nodes
    try:
        has_trained = newest_step(RunFolder.of(recipe).checkpoints) is not None
    except OSError:  # the start says what is wrong with the folder
        return {}
    try:
        plan = for_ranks(recipe, ranks, "gpu" if on_gpus else host_backend())
    except (ConfigError, LaunchError):  # the ranks refuse this layout themselves
        return {}
    if on_gpus and device is not None:
        refuse_what_cannot_fit(recipe, ranks, device, force=force or has_trained)
        if node.node_rank == 0:
            print(f"keepstep: {verdict(recipe, ranks, device)}", file=sys.stderr)
    elif not on_gpus:
        refuse_what_no_host_holds(recipe, node, force=force or has_trained)
    return plan


def refuse_what_no_host_holds(recipe: Recipe, node: Node, *, force: bool) -> None:
    """Raise LaunchError if the state of this machine's ranks alone is far above its memory and swap."""
    parts = memory_of(recipe, node.ranks * node.nodes, "cpu").parts
    needed = node.ranks * sum(parts[name] for name in ("weights", "optimizer state"))
    total = psutil.virtual_memory().total + psutil.swap_memory().total
    if not force and needed > (1 + MARGIN) * total:
        raise LaunchError(
            f"weights and optimizer state of {node.ranks} ranks need {needed / GIB:.1f} GiB, but this machine has "
            f"{total / GIB:.1f} GiB with swap; use a smaller model or more machines with parallel.engine=fsdp2, or add "
            "--force to start it all the same"
        )


def host_backend() -> Backend:
    """The kind of this machine's CPU: without AVX-512, x86 has no products in 16 bits."""
    try:
        flags = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text("ascii", errors="replace"), re.MULTILINE)
    except OSError:
        return "cpu"
    return "slow_cpu" if flags and "avx512bw" not in flags[1].split() else "cpu"


def for_ranks(recipe: Recipe, ranks: int, backend: Backend) -> dict[str, str]:
    """The plan as an environment variable, which ranks show beside measured bytes when memory runs out.

    `train/health/exhausted.py` reads it."""
    saving = what_would_fit(recipe, ranks)
    changes = [f"{overrides(setting)} (saves {saved / GIB:.2f} GiB)" for setting, saved in saving]
    document = {"parts": _as_measured(memory_of(recipe, ranks, backend)), "changes": changes}
    return {PLAN_VARIABLE: json.dumps(document)}


def _as_measured(memory: Memory) -> Mapping[str, Any]:
    """The plan's bytes in the groups of `train.health.device_memory.describe`."""
    parts = dict(memory.parts)
    groups = {
        "weights": parts.pop("weights"),
        "optimizer state": parts.pop("optimizer state"),
        "reserved and unused": parts.pop("allocator"),
        "other processes and libraries": parts.pop("CUDA context", 0.0) + parts.pop("process", 0.0),
    }
    return groups | {"gradients, activations and buffers": sum(parts.values())}
