"""Fully sharded data parallel (torch's `fully_shard`): each rank holds a slice of all weights, gradients and state.

Each block is one unit. The parts outside of blocks (embedding, last norm, head) form the outer unit.

| when                          | what moves, per parameter of the unit (w bytes: 4 in fp32, else 2)     |
| ----------------------------- | ---------------------------------------------------------------------- |
| before a unit's forward       | all-gather of its weights: w                                           |
| before a block's backward     | the same again, if `reshard_after_forward` freed them: w               |
| after a unit's backward       | reduce-scatter of fp32 gradients: 4, in each micro batch or only the last |
| after the last backward, HSDP | all-reduce of the gradient's slice over `replicate`: 4 / shard         |

The outer unit is needed at both ends of a pass and stays gathered between forward and backward. With
`reduce_every_micro_batch` false, earlier micro batches send nothing and keep whole fp32 gradients instead.

Memory per parameter and rank, in bytes, with S ranks on the shard axis: 4/S of weight, 4/S of gradient, and 1/S of the
optimizer state (8 with AdamW). Units that are gathered (the outer one and one or two blocks) take w more.

The model is built on the meta device, cut, and then filled slice by slice. No rank ever holds all of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from parallel.bootstrap import Runtime
from parallel.config import ParallelConfig
from parallel.engine import Trainable
from parallel.engines.blocks import apply_to_blocks
from parallel.engines.precision import DTYPES, LossScaler
from parallel.engines.tensor_parallel import split_model
from parallel.engines.torch_engine import TorchEngine, build_without_values, fill


def build_fsdp2(config: ParallelConfig, runtime: Runtime, trainable: Trainable) -> TorchEngine:
    """The engine `fsdp2`, with initial weights. Collective."""
    assert runtime.mesh is not None
    model = build_without_values(trainable.build, torch.device("meta"))
    root = shard_model(model, config, runtime.mesh)
    materialise(model, runtime.device)
    fill(model, trainable.initial_value)
    return wrap_in_engine(root, model, config, runtime, trainable)


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
        after_evaluation=reshard_all,
    )


def shard_model(model: nn.Module, config: ParallelConfig, mesh: DeviceMesh) -> FSDPModule:
    """Cut each block, then the rest, in place. Collective."""
    if mesh["tensor"].size() > 1:
        split_model(model, mesh["tensor"])
    apply_to_blocks(model, config)
    data_mesh = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    # Do not cast inputs: cosine and sine of RoPE stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.precision], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    blocks = [
        fully_shard(block, mesh=data_mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
        for block in model.get_submodule("layers").children()
    ]
    for block, following in pairwise(blocks):  # in the backward pass torch prefetches one block by itself
        block.set_modules_to_forward_prefetch([following])
    return fully_shard(model, mesh=data_mesh, mp_policy=policy)


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
