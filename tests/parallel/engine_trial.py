"""Programs for ranks: train a tiny GPT under an engine and report what must not depend on the engine.

T sequence, V vocabulary.
"""

import dataclasses
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from data_pipeline.stream.batch import IGNORE, Batch
from parallel.bootstrap import Runtime, choose_device, start
from parallel.build_engine import build_engine
from parallel.collectives import gather_objects, sum_over_ranks
from parallel.config import ParallelConfig
from parallel.engine import CheckpointTensor, Engine, NormLimit, Trainable, no_limit
from parallel.environ import World, read_world
from parallel.fragments import FlatFragment
from parallel.layout import resolve_layout
from parallel.mesh import build_mesh, data_parallel_group
from train.device_batch import DeviceBatch, loss_by_source, to_device
from train.evaluation.validation import averaged
from train.model.config import ModelConfig
from train.model.gpt import GPT, initial_value
from train.model.mlp import Auxiliary, SwiGLU
from train.optim.config import OptimConfig
from train.optim.groups import build_optimizer

T, V, GLOBAL_BATCH, MICRO_BATCHES = 32, 128, 8, 2
LR = 1e-2
LOSS = loss_by_source(2)


def config_of(**settings: Any) -> ParallelConfig:
    """A configuration for tests: fp32 on CPU, with the given settings."""
    return ParallelConfig(**{"precision": "fp32", "device": "cpu", "timeout_seconds": 600.0, **settings})


def runtime_of(config: ParallelConfig) -> Runtime:
    """Like `start`, but processes that already have a process group only change their layout. Collective."""
    world = read_world(os.environ)
    if config.engine == "single" or not dist.is_initialized():
        return start(config, world)
    layout = resolve_layout(config, world.world_size)
    device = choose_device(config.device, world.local_rank)
    mesh = build_mesh(layout, device.type)
    return Runtime(world, layout, device, mesh, data_parallel_group(mesh))


def fake_runtime(config: ParallelConfig, world_size: int = 2) -> Runtime:
    """Rank 0 of a `fake_group`, on CPU."""
    layout = resolve_layout(config, world_size)
    mesh = build_mesh(layout, "cpu")
    world = World(0, world_size, 0, 1, "", 0, "fake")
    return Runtime(world, layout, torch.device("cpu"), mesh, data_parallel_group(mesh))


class ReportingSwiGLU(SwiGLU):
    """A SwiGLU with an auxiliary loss and two metrics that are sums over tokens, so they add up over any cut."""

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Auxiliary]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The output of SwiGLU; the loss makes the mean input of each token small."""
        means_BT = x_BTD.float().mean(dim=-1)
        metrics_M = torch.stack((means_BT.detach().abs().sum(), torch.ones_like(means_BT).sum()))
        return super().forward(x_BTD), Auxiliary(10 * means_BT.square().sum(), metrics_M)


def build_reporting(config: ModelConfig) -> GPT:
    """The model with `ReportingSwiGLU` in each block."""
    model = GPT(config)
    for block in model.layers.values():
        block.mlp = ReportingSwiGLU(config)
    return model


def trainable(
    *, reporting: bool = False, algorithm: Any = "adamw", ema_decay: float | None = None, **model: Any
) -> Trainable:
    """The tiny GPT, with the given model settings. `reporting`: its blocks report an auxiliary loss and metrics."""
    shape: dict[str, Any] = {"vocab_size": V, "seq_len": T, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "d_model": 64}
    config = ModelConfig(**{**shape, **model})
    return Trainable(
        build=lambda: build_reporting(config) if reporting else GPT(config),
        initial_value=lambda name, pairs: initial_value(name, pairs, config, seed=1),
        optimizer=lambda module: build_optimizer(module, OptimConfig(lr=LR, algorithm=algorithm, ema_decay=ema_decay)),
    )


def global_batch(step: int) -> Batch:
    """Rows with unequal numbers of targets. One row has no target, and one has two documents."""
    generator = np.random.default_rng(step % 3)
    text = generator.integers(0, V, (GLOBAL_BATCH, T + 1))
    tokens, labels = text[:, :-1], text[:, 1:].copy()
    labels[0, 5:], labels[3, 20:], labels[5] = IGNORE, IGNORE, IGNORE
    positions = np.tile(np.arange(T), (GLOBAL_BATCH, 1))
    documents = np.zeros((GLOBAL_BATCH, T), np.int32)
    documents[1, 10:], positions[1, 10:] = 1, np.arange(T - 10)
    rows = np.arange(GLOBAL_BATCH)
    return Batch(tokens, labels, positions, documents, (rows % 2).astype(np.int32), rows)


def micro_batches(step: int, runtime: Runtime, number: int = MICRO_BATCHES) -> tuple[list[DeviceBatch], int]:
    """This rank's micro batches of a step, and the number of targets on all ranks."""
    whole = global_batch(step)
    own_rows = np.arange(GLOBAL_BATCH)
    own_rows = own_rows[own_rows % runtime.data_parallel_size == runtime.data_parallel_rank]
    parts = []
    for rows in np.array_split(own_rows, number):
        part = Batch(**{field.name: getattr(whole, field.name)[rows] for field in dataclasses.fields(Batch)})
        parts.append(to_device(part, runtime.device))
    return parts, int((whole.labels_BT != IGNORE).sum())


def one_step(
    engine: Engine, runtime: Runtime, step: int, norm_limit: NormLimit = no_limit
) -> tuple[list[float], float]:
    """Sums over all ranks divided by the number of targets: loss by source, then metrics; and the gradient norm."""
    batches, targets = micro_batches(step, runtime)
    sums_R = engine.forward_backward(batches, LOSS, runtime.data_parallel_size / targets)
    norm = engine.step(LR * (step + 1) / 10, 1.0, norm_limit)
    return (sum_over_ranks(sums_R, runtime.data_parallel_group) / targets).tolist(), norm


def whole(tensor: CheckpointTensor) -> Tensor:
    """All elements, gathered from all ranks, on the CPU. Collective."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().cpu().clone()
    if isinstance(tensor, FlatFragment):
        full = torch.full((tensor.numel(),), torch.nan)
        for start_at, flat in gather_objects((tensor.start, tensor.flat.cpu().clone())):
            full[start_at : start_at + flat.numel()] = flat
        return full.view(tensor.shape)
    return tensor.cpu().clone()


def train(config: ParallelConfig, steps: int = 10, **model: Any) -> dict[str, Any]:
    """Losses, metrics, norms, validation sums, and the whole state before and after. Collective."""
    runtime = runtime_of(config)
    engine = build_engine(config, runtime, trainable(**model))
    before = {name: whole(tensor) for name, tensor in engine.state().items()}
    curve = [one_step(engine, runtime, step) for step in range(steps)]
    validation = engine.evaluate(micro_batches(1, runtime, number=1)[0][0], LOSS)
    with averaged(engine):  # the weights themselves, if there is no average
        of_average = engine.evaluate(micro_batches(1, runtime, number=1)[0][0], LOSS)
    after = {name: whole(tensor) for name, tensor in engine.state().items()}
    engine.close()
    evaluated = sum_over_ranks(validation, runtime.data_parallel_group)
    evaluated_average = sum_over_ranks(of_average, runtime.data_parallel_group)
    return {
        "losses": [sum(sums_R[:2]) for sums_R, _ in curve],
        "metrics": [sums_R[2:] for sums_R, _ in curve],
        "norms": [norm for _, norm in curve],
        "validation": evaluated.cpu(),
        "validation of the average": evaluated_average.cpu(),
        "before": before,
        "after": after,
    }


def train_each(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results of one training run per case, and whether its first steps repeat bit for bit. Collective."""
    results = {}
    for name, settings in cases.items():
        model = settings.pop("model", {})
        results[name] = train(config_of(**settings), **model)
        repeated = train(config_of(**settings), steps=4, **model)
        results[name]["repeated"] = all(repeated[key] == results[name][key][:4] for key in ("losses", "norms"))
    return results


def fail_on_rank_1(_: None) -> None:
    """Raise an error on rank 1 while the other ranks wait in a collective."""
    runtime = start(config_of(engine="ddp"), read_world(os.environ))
    if runtime.world.rank == 1:
        raise ValueError("on purpose")
    sum_over_ranks(torch.zeros(1))
