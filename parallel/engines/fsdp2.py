"""Fully sharded data parallel (torch's `fully_shard`): each rank holds a slice of all weights, gradients and state.

Each block is one unit. The embeddings form another one, and the last norm with the head a third. A tied head has the
embedding's matrix, so then these two are one unit, the outer one.

| when                          | what moves, per parameter of the unit (w bytes: 4 in fp32, else 2)     |
| ----------------------------- | ---------------------------------------------------------------------- |
| before a unit's forward       | all-gather of its weights: w                                           |
| before a block's backward     | the same again, if `reshard_after_forward` freed them: w               |
| after a unit's backward       | reduce-scatter of fp32 gradients: 4, in each micro batch or only the last |
| after the last backward, HSDP | all-reduce of the gradient's slice over `replicate`: 4 / shard         |

The units of the head and the outer one stay gathered between forward and backward. That of the embeddings is gathered
once: its backward needs no weights. The head's gradients are reduced first. The embeddings', and so a tied matrix's,
are complete only at the end of the backward pass. Each unit requests the weights of the next before it computes.

With `reduce_every_micro_batch` false, earlier micro batches send nothing and keep whole fp32 gradients instead.

Memory per parameter and rank, in bytes, with S ranks on the shard axis: 4/S of weight, 4/S of gradient, and 1/S of the
optimizer state (8 with AdamW). Units that are gathered (the outer one and one or two blocks) take w more.

w is 1 for the matrices of blocks with `precision: fp8` and `fp8_scaling: tensorwise` (`fp8.py`).

The model is built on the meta device, cut, and then filled slice by slice. No rank ever holds all of it.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from parallel.bootstrap import Runtime
from parallel.config import ParallelConfig
from parallel.engine import Trainable
from parallel.engines.blocks import apply_to_blocks
from parallel.engines.fp8 import compute_scales, require_equal_parts
from parallel.engines.precision import DTYPES, LossScaler
from parallel.engines.tensor_parallel import exchange_beside_products, split_model
from parallel.engines.torch_engine import TorchEngine, build_without_values
from parallel.mesh import limit_collectives


def build_fsdp2(config: ParallelConfig, runtime: Runtime, trainable: Trainable) -> TorchEngine:
    """The engine `fsdp2`, with weights that are not set yet. Collective."""
    assert runtime.mesh is not None
    model = build_without_values(trainable.build, torch.device("meta"))
    root = shard_model(model, config, runtime.mesh)
    materialise(model, runtime.device)
    engine = wrap_in_engine(root, model, config, runtime, trainable)
    limit_collectives(config.timeout_seconds)  # the optimizer may have made a group
    return engine


def wrap_in_engine(
    root: FSDPModule, model: nn.Module, config: ParallelConfig, runtime: Runtime, trainable: Trainable
) -> TorchEngine:
    """The engine around a sharded model that has memory. `root` is the same model with FSDP2's methods."""

    @contextmanager
    def exchange(is_last: bool) -> Iterator[None]:
        root.set_requires_gradient_sync(is_last or config.reduce_every_micro_batch)
        root.set_requires_all_reduce(is_last)
        root.set_is_last_backward(is_last)
        yield

    def reshard_all() -> None:  # after an evaluation no backward pass does it
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

    return TorchEngine(
        model,
        trainable.optimizer(model),
        device=runtime.device,
        scaler=LossScaler() if config.precision == "fp16" else None,
        exchange=exchange,
        before_passes=partial(compute_scales, model) if config.gathers_fp8 else lambda: None,
        after_evaluation=reshard_all,
    )


def shard_model(model: nn.Module, config: ParallelConfig, mesh: DeviceMesh) -> FSDPModule:
    """Cut each unit in place. Collective."""
    if mesh["tensor"].size() > 1:
        split_model(model, mesh["tensor"])
    if config.async_tensor:
        exchange_beside_products(mesh["tensor"])
    if config.gathers_fp8:
        require_equal_parts(model, mesh["shard"].size())
    apply_to_blocks(model, config)
    data_mesh = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    # Do not cast inputs: cosine and sine of RoPE stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.precision], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shard = partial(fully_shard, mesh=data_mesh, mp_policy=policy)
    units = [
        shard(block, reshard_after_forward=config.reshard_after_forward)
        for block in model.get_submodule("layers").children()
    ]
    if model.get_parameter("head.weight") is not model.get_parameter("embed.weight"):
        units = [_shard_lookups(model, shard), *units, _shard_head(model, shard)]
    # torch warns of operations in place on a unit's output; the model has none.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
    root = shard(model)
    for unit, following in pairwise([root, *units]):  # in the backward pass torch prefetches one unit by itself
        unit.set_modules_to_forward_prefetch([following])
    return root


def _shard_lookups(model: nn.Module, shard: Callable[..., Any]) -> FSDPModule:
    """The embeddings as one unit. Their backward needs no weights, so they are gathered once."""
    lookups = [module for module in model.children() if isinstance(module, nn.Embedding)]
    unit, *_ = shard(lookups, reshard_after_forward=True)
    unit.set_unshard_in_backward(False)
    unit.set_modules_to_backward_prefetch([unit])  # nothing; else the last unit of the micro batch before
    return unit


def _shard_head(model: nn.Module, shard: Callable[..., Any]) -> FSDPModule:
    """The last norm and the head as one unit. The backward pass begins with it, so it stays gathered."""
    unit, _ = shard([model.get_submodule("norm"), model.get_submodule("head")], reshard_after_forward=False)
    return unit


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give parameters on the meta device memory. Tied ones stay tied, which `to_empty` alone does not ensure."""
    homes = [(module, name) for module in model.modules() for name in module._parameters]
    before = [module._parameters[name] for module, name in homes]
    model.to_empty(device=device)
    first_home: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for (module, name), parameter in zip(homes, before, strict=True):
        if parameter is not None:
            owner, owned = first_home.setdefault(parameter, (module, name))
            module._parameters[name] = owner._parameters[owned]
