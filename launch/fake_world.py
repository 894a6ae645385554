"""`keepstep run RECIPE --fake-world N --fake-rank R`: what one rank of many holds and sends, on a laptop."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from train.config import Recipe
from train.config_file import load_recipe
from train.errors import ConfigError
from train.exit_codes import FINISHED

if TYPE_CHECKING:
    from parallel.analysis.fake_world import RankDescription


def run_fake_world(recipe_path: str | Path, overrides: Sequence[str], world_size: int, rank: int) -> int:
    """Print the description of one rank; returns the exit code. Errors as of the real run."""
    started = time.perf_counter()
    recipe = load_recipe(recipe_path, overrides)
    print("\n".join(lines_about(recipe, describe(recipe, world_size, rank), rank)))
    print(f"found in {time.perf_counter() - started:.1f} s")
    return FINISHED


def describe(recipe: Recipe, world_size: int, rank: int) -> "RankDescription":
    import torch

    from parallel.analysis.fake_world import describe_rank
    from parallel.bootstrap import Runtime
    from parallel.engine import Trainable
    from train.device_batch import DeviceBatch, loss_by_source
    from train.model.gpt import GPT, initial_value
    from train.optim.groups import build_optimizer

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
        Trainable(
            build=partial(GPT, recipe.model),
            initial_value=partial(initial_value, config=recipe.model, seed=recipe.train.seed),
            optimizer=partial(build_optimizer, config=recipe.optim),
        ),
        world_size=world_size,
        rank=rank,
        micro_batches=micro_batches,
        loss_fn=loss_by_source(1),
    )


def lines_about(recipe: Recipe, found: "RankDescription", rank: int) -> list[str]:
    layout = found.layout
    sizes = (layout.replicate, layout.shard, layout.tensor)
    axes = zip(("replicate", "shard", "tensor"), found.coordinates, sizes, strict=True)
    lines = [
        f"rank {rank} of {layout.world_size}, engine {recipe.parallel.engine}, {recipe.parallel.precision}",
        "place          " + ", ".join(f"{axis} {at} of {size}" for axis, at, size in axes),
        f"parameters     {found.parameters:,}, of which this rank keeps {found.held_parameters:,}",
        _bytes_line("state", found.state_bytes, found.counted_state_bytes, "weights, gradients, moments"),
    ]
    for kind in sorted(found.traffic.keys() | (found.counted_traffic or {}).keys()):
        counted = None if found.counted_traffic is None else found.counted_traffic.get(kind, 0)
        lines.append(_bytes_line(kind, found.traffic.get(kind, 0), counted, "per step"))
    if found.counted_traffic is None:
        lines.append("DeepSpeed takes no step on fake tensors: these are the formulas of docs/parallelism.md")
    elif layout.tensor > 1:
        lines.append("what tensor parallelism exchanges within blocks is counted, but not in the formula")
    return lines


def _bytes_line(name: str, formula: float, counted: float | None, what: str) -> str:
    seen = "" if counted is None else f", {_readable(counted)} counted in a fake step"
    return f"{name:<14} {_readable(formula)} by the formula{seen} ({what})"


def _readable(size: float) -> str:
    unit, scale = ("GiB", 2**30) if size >= 2**30 else ("MiB", 2**20)
    return f"{size / scale:.3f} {unit}"
