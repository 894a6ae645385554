"""Rotary position embedding (RoFormer, Su et al. 2021). B micro batch, T sequence, H heads, E head width."""

import torch
from torch import Tensor

from train.model.config import ModelConfig


def rope_rotation(positions_BT: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, each (B, T, 1, E/2), in fp32 under every precision.

    RoFormer, equation 15. A pair is element i of the first half of a head and element i of the second, as in Llama."""
    with torch.autocast(positions_BT.device.type, enabled=False):
        exponent_E = torch.arange(0, config.head_dim, 2, device=positions_BT.device).float() / config.head_dim
        angle_BT1E = positions_BT.float()[..., None, None] * config.rope_theta**-exponent_E
        return angle_BT1E.cos(), angle_BT1E.sin()


def rotate(x_BTHE: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Each pair turned by its position's angle, computed in fp32 and returned in the input's precision."""
    cos, sin = rotation
    first, second = x_BTHE.float().unflatten(-1, (2, -1)).unbind(-2)  # backward of `chunk` would fill and add zeros
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHE.dtype)
