"""The plan's memory beside what one rank of the real engines holds in a step on fake tensors, `keepstep plan --exact`.

The model is built on the meta device and cut by the engine, in a world whose collectives complete immediately
(`parallel/analysis/fake_world.py`). Fake tensors lie on a CPU, so the plan is made for one here: a GPU has larger
chunks of the loss.
"""

from dataclasses import dataclass

from launch.fake_world import describe
from launch.plan.activations import Backend
from launch.plan.estimate import memory_of, shape_of
from launch.plan.memory import in_use
from launch.terminal import print_table
from train.config import Recipe

GIB = 2**30
STATE = ("weights", "gradients", "optimizer state")


@dataclass(frozen=True)
class Exact:
    """Planned and counted numbers of one rank."""

    parameters: tuple[int, int]
    """Parameters of the model: planned, counted."""
    state_bytes: tuple[float, float | None]
    """Weights, gradients and optimizer state after a backward pass. None: DeepSpeed takes no step on fake tensors."""
    peak_bytes: tuple[float, float | None]
    """Most bytes that tensors hold at the same time in a step."""


def count_exactly(recipe: Recipe, gpus: int, rank: int = 0) -> Exact:
    """Count what a rank holds. ConfigError or LaunchError if the recipe does not fit the number of ranks."""
    from train.model.kernels.linear import SLOW

    backend: Backend = "slow_cpu" if SLOW else "cpu"
    planned, found = memory_of(recipe, gpus, backend), describe(recipe, gpus, rank, with_peak=True)
    return Exact(
        parameters=(shape_of(recipe.model).parameters, found.parameters),
        state_bytes=(found.state_bytes, found.counted_state_bytes),
        peak_bytes=(in_use(planned), found.counted_peak_bytes),
    )


def print_exact(found: Exact) -> None:
    """Print both numbers side by side."""
    rows = [
        ["parameters of the model", *(f"{number:,}" for number in found.parameters)],
        ["weights, gradients, optimizer state", *map(_gib, found.state_bytes)],
        ["peak of a step, as on a CPU", *map(_gib, found.peak_bytes)],
    ]
    print_table(("one rank, in a fake world", ">plan", ">counted"), rows)
    if found.peak_bytes[1] is None:
        print("DeepSpeed takes no step on fake tensors, so only parameters are counted")


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.3f} GiB"
