"""`keepstep run RECIPE --fake-world N --fake-rank R`: what one rank of many holds and sends, on a laptop."""

import time
from collections.abc import Sequence
from pathlib import Path


def run_fake_world(recipe_path: str | Path, overrides: Sequence[str], world_size: int, rank: int) -> int:
    """Print the description of one rank; returns the exit code. Errors as of the real run."""
    started = time.perf_counter()
    from functools import partial

    import torch

    from parallel.bootstrap import Runtime
    from parallel.engine import Trainable
    from parallel.fake_world import describe_rank
    from train.config_file import load_recipe
    from train.device_batch import DeviceBatch, loss_by_source
    from train.errors import ConfigError
    from train.exit_codes import FINISHED
    from train.model import GPT, initial_value
    from train.optim import build_optimizer

    recipe = load_recipe(recipe_path, overrides)

    def micro_batches(runtime: Runtime) -> list[DeviceBatch]:
        try:
            number = recipe.grad_accum_steps(runtime.data_parallel_size)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        shape = (recipe.train.micro_batch_size, recipe.model.seq_len)
        tokens = torch.zeros(shape, dtype=torch.int64)
        documents, sources = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape[0], dtype=torch.int32)
        return [DeviceBatch(tokens, tokens, tokens, documents, sources)] * number

    rank_is = describe_rank(
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
    layout = rank_is.layout
    print(f"rank {rank} of {world_size}: engine {recipe.parallel.engine}, {recipe.parallel.precision}")
    for axis, size, at in zip(
        ("replicate", "shard", "tensor"),
        (layout.replicate, layout.shard, layout.tensor),
        rank_is.coordinates,
        strict=True,
    ):
        print(f"  {axis:<12} {at} of {size}")
    print(f"  model        {rank_is.parameters:,} parameters, of which this rank keeps {rank_is.held_parameters:,}")
    _print_bytes("state", rank_is.state_bytes, rank_is.counted_state_bytes, "weights, gradients, moments")
    kinds = sorted(rank_is.traffic.keys() | (rank_is.counted_traffic or {}).keys())
    for kind in kinds:
        counted = None if rank_is.counted_traffic is None else rank_is.counted_traffic.get(kind, 0)
        _print_bytes(kind, rank_is.traffic.get(kind, 0), counted, "per step")
    if rank_is.counted_traffic is None:
        print("  DeepSpeed cannot take a step on fake tensors; these are the formulas of docs/parallelism.md")
    print(f"  found in {time.perf_counter() - started:.1f} s")
    return FINISHED


def _print_bytes(name: str, formula: float, counted: float | None, what: str) -> None:
    seen = "" if counted is None else f", {_readable(counted)} counted in a fake step"
    print(f"  {name:<14} {_readable(formula)} by the formula{seen} ({what})")


def _readable(size: float) -> str:
    unit, scale = ("GiB", 2**30) if size >= 2**30 else ("MiB", 2**20)
    return f"{size / scale:.3f} {unit}"
