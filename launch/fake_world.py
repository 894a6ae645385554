"""`keepstep run RECIPE --fake-world N --fake-rank R`: describes memory and traffic of one rank of N."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from launch.terminal import duration, print_json
from train.config import Recipe
from train.config_file import load_recipe
from train.errors import ConfigError
from train.exit_codes import FINISHED

if TYPE_CHECKING:
    from parallel.analysis.fake_world import RankDescription


def run_fake_world(
    recipe_path: str | Path, overrides: Sequence[str], world_size: int, rank: int, as_json: bool = False
) -> int:
    """Print the description of one rank and return the exit code. Raises the errors of a real run."""
    started = time.perf_counter()
    recipe = load_recipe(recipe_path, overrides)
    found = describe(recipe, world_size, rank)
    if as_json:
        parallel = {"engine": recipe.parallel.engine, "precision": recipe.parallel.precision}
        print_json({"rank": rank, **parallel, **asdict(found)})
    else:
        print("\n".join(lines_about(recipe, found, rank)))
        print(f"computed in {duration(time.perf_counter() - started)}")
    return FINISHED


def describe(recipe: Recipe, world_size: int, rank: int, with_peak: bool = False) -> "RankDescription":
    """Simulate one step of one rank on fake tensors. ConfigError or LaunchError if the recipe does not fit.

    `with_peak`: count live bytes too, as on this CPU."""
    import torch

    from parallel.analysis.fake_world import describe_rank
    from parallel.bootstrap import Runtime
    from train.device_batch import DeviceBatch, loss_by_source
    from train.start import trainable_of

    def micro_batches(runtime: Runtime) -> list[DeviceBatch]:
        try:
            number = recipe.grad_accum_steps(runtime.data_parallel_size)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        shape = (recipe.train.micro_batch_size, recipe.model.seq_len)
        tokens = torch.zeros(shape, dtype=torch.int64)
        documents, sources = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape[0], dtype=torch.int32)
        return [DeviceBatch(tokens, tokens, tokens, documents, sources)] * number

    return describe_rank(
        recipe.parallel,
        trainable_of(recipe),
        world_size=world_size,
        rank=rank,
        micro_batches=micro_batches,
        loss_fn=loss_by_source(1),
        with_peak=with_peak,
    )


def lines_about(recipe: Recipe, found: "RankDescription", rank: int) -> list[str]:
    """Return the description as lines for people: bytes by the formulas, and as counted in the fake step."""
    layout = found.layout
    axes = zip(layout.axes, found.coordinates, layout.axes.values(), strict=True)
    counted_traffic = found.counted_traffic or {}
    rows = [("state", found.state_bytes, found.counted_state_bytes)]
    for kind in sorted(found.traffic.keys() | counted_traffic.keys()):
        counted = None if found.counted_traffic is None else counted_traffic.get(kind, 0)
        rows.append((f"{kind.replace('_', '-')} per step", found.traffic.get(kind, 0), counted))
    lines = [
        f"rank {rank} of {layout.world_size}, engine {recipe.parallel.engine}, {recipe.parallel.precision}",
        "coordinates    " + ", ".join(f"{axis} {index} of {size}" for axis, index, size in axes),
        f"parameters     {found.parameters:,}; this rank keeps {found.held_parameters:,}",
        "",
        f"{'bytes':<24} {'by formula':>14} {'counted':>14}",
        *(f"{name:<24} {_size(formula):>14} {_size(counted):>14}".rstrip() for name, formula, counted in rows),
        "",
        "state: weights, gradients and optimizer state; counted: in a step on fake tensors",
    ]
    if found.counted_traffic is None:
        lines.append("DeepSpeed takes no step on fake tensors: only the formulas of docs/parallelism.md are shown")
    elif layout.tensor > 1:
        lines.append("the formulas leave out the traffic of tensor parallelism within blocks; it is counted")
    return lines


def _size(count: float | None) -> str:
    if count is None:
        return ""
    unit, scale = ("GiB", 2**30) if count >= 2**30 else ("MiB", 2**20)
    return f"{count / scale:.3f} {unit}"
