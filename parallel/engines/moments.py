"""The state of the optimizer as it stands before the first step."""

import torch
from torch import Tensor


def zero_moments(parameter: Tensor, *, second: bool = True) -> dict[str, Tensor]:
    """What AdamW's fused kernel keeps of a parameter: `step` is on the device, so that counting never waits for it."""
    value = parameter.detach()
    names = ("exp_avg", "exp_avg_sq") if second else ("exp_avg",)
    return {"step": torch.zeros((), device=value.device), **{name: torch.zeros_like(value) for name in names}}
