"""Matrix products of the blocks in fp8, by torchao, on Hopper and newer.

| part                                             | precision                                               |
| ------------------------------------------------ | ------------------------------------------------------- |
| linear layers inside blocks                      | fp8: inputs and weights e4m3, gradients of outputs e5m2 |
| embedding, norms, attention, head, loss          | bf16, as under `precision: bf16`                        |
| masters, gradients, reduction, optimizer state   | fp32, as under every precision                          |

Weights are cast to bf16 once a step; FSDP2 gathers them in bf16. Each product casts weights and activations to fp8 and
scales each tensor by its own largest value (torchao's recipe `tensorwise`). Use it with `compile: true`, which fuses
the casts with the operations before them.

torchao replaces each `nn.Linear` by a `Float8Linear` with the same parameter objects. So names, shapes, initial values
and checkpoints are those of any other precision, and a run may change its precision when it resumes.
"""

import logging
from collections.abc import Callable

import torch
from torch import nn

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


def build_in_fp8(build: Callable[[], nn.Module], *, emulate: bool = False) -> nn.Module:
    """The model with the linear layers of its blocks in fp8, before an engine wraps it.

    `emulate`: round to fp8 but multiply in fp32, on any device. Tests use it."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = build()
    for block in model.get_submodule("layers").children():
        convert_to_float8_training(block, config=Float8LinearConfig(emulate=emulate))
    return model
