"""Mixed precision: working copies of the fp32 master weights, and the loss scale for fp16.

Parameters, gradients, their reduction and the optimizer state are fp32 under every engine: a bf16 weight near 1 cannot
change by less than 0.004, so most updates would be lost. Only the working copies, which the forward and backward passes
use, are narrower. FSDP2 and DeepSpeed make these copies themselves; single and DDP use `working_weights`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Type of the working copies by `parallel.precision`. fp8 is bf16 except in the products inside blocks (`fp8.py`)."""


@contextmanager
def working_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A context in which modules see `dtype` copies of their parameters; gradients flow to the fp32 parameters.

    The copies are made once. The context must include the backward passes, because recomputed blocks read their weights
    again."""
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
    """Dynamic loss scale against underflow of fp16 gradients (Micikevicius et al. 2018, section 3.2).

    Losses are multiplied by `scale` and gradients divided by it. It halves after a step with a non-finite gradient,
    which is skipped, and doubles after `GROWTH_STEPS` finite ones in a row. Both numbers are tensors, so checkpoints
    include them."""

    GROWTH_STEPS = 2000

    def __init__(self) -> None:
        self.scale = torch.tensor(2.0**16)
        self.good_steps = torch.tensor(0.0)

    def update(self, finite: bool) -> None:
        """Adjust the scale after a step. `finite` must be the same on all ranks."""
        if not finite:
            self.scale.div_(2.0)
            self.good_steps.zero_()
            return
        self.good_steps.add_(1.0)
        if self.good_steps.item() == self.GROWTH_STEPS:
            self.scale.mul_(2.0)
            self.good_steps.zero_()

    def state(self) -> dict[str, Tensor]:
        """The tensors that checkpoints save and fill, by name."""
        return {"scaler.scale": self.scale, "scaler.good_steps": self.good_steps}
