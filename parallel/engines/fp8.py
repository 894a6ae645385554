"""Matrix products of the blocks in fp8, by torchao, on Hopper and newer.

| what                                     | in                                                             |
| ---------------------------------------- | -------------------------------------------------------------- |
| linear layers inside blocks              | fp8: inputs and weights e4m3, gradients of outputs e5m2        |
| embedding, norms, attention, head, loss  | bf16, as under `precision: bf16`                               |
| masters, gradients, reduction, moments   | fp32, as under every precision                                 |

Weights are cast to bf16 once a step (FSDP2: gathered in bf16), and from there to fp8 in each product, as activations
are: each tensor is scaled by its own largest value (torchao's recipe `tensorwise`). That is meant for `compile: true`,
which fuses the casts with what stands before them.

torchao puts a `Float8Linear` in the place of each `nn.Linear`, with the same parameter objects. So names, shapes,
initial values and checkpoints are those of any other precision, and a run may change its precision when it goes on.
"""

import logging
from collections.abc import Callable

import torch
from torch import nn

from parallel.errors import LaunchError

NEEDED = (9, 0)
"""Compute capability of Hopper. Ada (8.9) has such products too, but is left out, untried."""


def require_fp8(device: torch.device) -> None:
    """Raises LaunchError where the products cannot be made."""
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
    """Its import warns of kernels for other devices, none of which is used here, and torch of how torchao uses it."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def build_in_fp8(build: Callable[[], nn.Module], *, emulate: bool = False) -> nn.Module:
    """The model with the linear layers of its blocks in fp8, to be wrapped by an engine.

    `emulate`: round to fp8, but multiply in fp32, on any device. For tests."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = build()
    for block in model.get_submodule("layers").children():
        convert_to_float8_training(block, config=Float8LinearConfig(emulate=emulate))
    return model
