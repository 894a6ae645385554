"""Matrix products of the blocks in fp8, by torchao, on Hopper and newer.

| part                                             | precision                                  |
| ------------------------------------------------ | ------------------------------------------ |
| linear layers inside blocks                      | fp8, by `parallel.fp8_scaling`             |
| embedding, norms, attention, head, loss          | bf16, as under `precision: bf16`           |
| masters, gradients, reduction, optimizer state   | fp32, as under every precision             |

| `parallel.fp8_scaling` | scales                                   | types of values          | FSDP2 gathers |
| ---------------------- | ---------------------------------------- | ------------------------ | ------------- |
| rowwise                | one for each row or column that is added up, a power of two | e4m3  | bf16          |
| tensorwise             | one for each tensor                      | e4m3, gradients e5m2     | fp8           |

With one scale for each tensor, a single large value costs all others precision. With one for each row it costs only
those of its row. A matrix has different rows in its forward and in its backward product, so its fp8 values are not the
same in both, and FSDP2 cannot gather them. `parallel.compile` must be true: it fuses the casts with the operations
before them.

In the tensorwise form, FSDP2 gathers one byte for each element of a matrix in a block. Each rank casts its own rows by
the scale of the whole matrix. All scales come from one small all-reduce before the passes of a step (`compute_scales`).

torchao replaces each `nn.Linear` by a `Float8Linear` with a parameter of the same name, shape and initial values. So
checkpoints are those of any other precision, and a run may change its precision when it resumes.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from parallel.config import ParallelConfig
from parallel.engine import Trainable
from parallel.errors import LaunchError

NEEDED = (9, 0)
"""Compute capability of Hopper. Ada (8.9) has fp8 products too, but has not been tested."""


def require_fp8(device: torch.device) -> None:
    """Raise LaunchError if the device or torchao does not support the products."""
    found = str(device)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found = f"{torch.cuda.get_device_name(device)} ({capability[0]}.{capability[1]})"
        if capability >= NEEDED:
            _import_torchao()
            return
    raise LaunchError(
        f"parallel.precision fp8 needs a CUDA device of compute capability {NEEDED[0]}.{NEEDED[1]} or more (Hopper and "
        f"newer), but this rank has {found}; set parallel.precision to bf16"
    )


def _import_torchao() -> None:
    silence_torchao()
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise LaunchError(
            f"parallel.precision fp8 needs torchao, which cannot be imported ({error}); "
            "`pip install 'keepstep[fp8]'`, or set parallel.precision to bf16"
        ) from error


def silence_torchao() -> None:
    """Hide the warnings of torchao's import: on kernels that are not used here, and on torch's deprecations."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def in_fp8(trainable: Trainable, config: ParallelConfig, *, emulate: bool = False) -> Trainable:
    """The same with the linear layers of its blocks in fp8. Raises LaunchError without torchao.

    `emulate`: round to fp8 but multiply in fp32, on any device."""
    _import_torchao()
    return replace(trainable, build=partial(_build, trainable.build, config, emulate))


def _build(build: Callable[[], nn.Module], config: ParallelConfig, emulate: bool) -> nn.Module:
    """The model with the linear layers of its blocks in fp8, before an engine wraps it."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    form = replace(
        Float8LinearConfig.from_recipe_name(config.fp8_scaling),
        emulate=emulate,
        enable_fsdp_float8_all_gather=config.gathers_fp8,
    )
    model = build()
    for block in model.get_submodule("layers").children():
        convert_to_float8_training(block, config=form)
    return model


def require_equal_parts(model: nn.Module, ranks: int) -> None:
    """Raise LaunchError if FSDP2 cannot cut the matrices in blocks into equal parts: torchao gathers no others."""
    for block in model.get_submodule("layers").children():
        for name, matrix in block.named_parameters():
            if matrix.dim() == 2 and len(matrix) % ranks:
                raise LaunchError(
                    f"parallel.fp8_scaling tensorwise needs matrices that {ranks} ranks of the shard axis cut evenly, "
                    f"but {name} has {len(matrix)} rows; set parallel.fp8_scaling to rowwise, or parallel.shard to a "
                    "divisor of the rows"
                )


def compute_scales(model: nn.Module) -> None:
    """Compute the scales by which FSDP2 casts each matrix before it is gathered. Collective.

    The matrices must be cut up, as they are before and after the passes of a step."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
