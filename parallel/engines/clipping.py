"""The norm of the whole gradient, however it is spread over ranks."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from parallel.collectives import sum_over_ranks
from parallel.sharded import as_sharded, local_part

EPSILON = 1e-6


def global_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """L2 norm over all elements of all ranks, the same bits on every rank, still on the device. Shape (). Collective.

    Each rank adds the squares of what it holds, divided by the number of ranks that hold the same: one sum over all
    ranks, whatever the layout, and not a number on one rank is not a number on all."""
    alike: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault(_copies(gradient), []).append(local_part(gradient))
    squares = torch.zeros((), device=device)
    for copies, tensors in alike.items():
        squares += get_total_norm(tensors).square() / copies
    return sum_over_ranks(squares).sqrt()


def _copies(gradient: Tensor) -> int:
    """Ranks that hold the same elements."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    sharded = as_sharded(gradient)
    if sharded is None:
        return world_size
    axes = zip(sharded.placements, sharded.device_mesh.shape, strict=True)
    holders = math.prod(size for placement, size in axes if not placement.is_replicate())
    return world_size // holders


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by, so that their norm is at most `max_norm`."""
    return min(1.0, max_norm / (norm + EPSILON))
