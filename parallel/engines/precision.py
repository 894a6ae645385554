"""fp32 masters, narrow matrix products: the working copies of weights, and the loss scale that fp16 needs.

Parameters, gradients, their reduction and the moments are fp32 under every engine (a bf16 weight near 1 cannot move by
less than 0.004, so most updates would vanish). What is narrow is the copy that the forward and backward pass see.
FSDP2 and DeepSpeed make that copy themselves; single and DDP use `working_weights`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Of the working copies. fp8 is bf16 but for the products inside blocks (parallel/engines/fp8.py)."""


@contextmanager
def working_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, modules see `dtype` copies of their parameters, made once; gradients flow to the fp32 parameters.

    It spans the backward passes too, for recomputed blocks read their weights again."""
    if dtype == torch.float32:
        yield
        return
    homes = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    copies = {parameter: parameter.to(dtype) for _, _, parameter in homes}  # one for tied parameters
    for module, name, parameter in homes:
        module._parameters[name] = copies[parameter]  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for module, name, parameter in homes:
            module._parameters[name] = parameter


class LossScaler:
    """Keeps fp16 gradients out of underflow: losses are multiplied by `scale`, gradients divided by it.

    Halves after a step with a non-finite gradient (which is skipped), doubles after `GROWTH_STEPS` good ones in a row
    (Micikevicius et al. 2018, section 3.2). The two numbers are tensors, so that checkpoints keep them."""

    GROWTH_STEPS = 2000

    def __init__(self) -> None:
        self.scale = torch.tensor(2.0**16)
        self.good_steps = torch.tensor(0.0)

    def update(self, finite: bool) -> None:
        """After each step, with a verdict that is the same on all ranks."""
        if not finite:
            self.scale.div_(2.0)
            self.good_steps.zero_()
            return
        self.good_steps.add_(1.0)
        if self.good_steps.item() == self.GROWTH_STEPS:
            self.scale.mul_(2.0)
            self.good_steps.zero_()

    def state(self) -> dict[str, Tensor]:
        return {"scaler.scale": self.scale, "scaler.good_steps": self.good_steps}
