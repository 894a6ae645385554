"""The norm of the whole gradient in any layout, and the clipping factor."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from parallel.collectives import sum_over_ranks
from parallel.sharded import as_sharded, local_part

EPSILON = 1e-6


def global_norm(
    gradients: Iterable[Tensor], device: torch.device, values: Tensor | None = None
) -> tuple[float, list[float]]:
    """L2 norm over all elements of all ranks, and the sums of `values` over all ranks, by one collective. Collective.

    Both have the same bits on every rank. Each rank adds up the squares of its elements, divided by the number of ranks
    that hold the same elements. So one sum over all ranks is right in every layout, and a NaN on one rank becomes a NaN
    on all. `values` is a vector in fp64 on the device."""
    by_replicas: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        by_replicas.setdefault(_replicas(gradient), []).append(local_part(gradient))
    squares = torch.zeros((), device=device)
    for replicas, tensors in by_replicas.items():
        squares += get_total_norm(tensors).square() / replicas
    squares = squares.double()[None]
    totals = sum_over_ranks(squares if values is None else torch.cat((squares, values)))
    totals[:1] = totals[:1].float().sqrt()
    norm, *sums = totals.tolist()
    return norm, sums


def _replicas(gradient: Tensor) -> int:
    """Number of ranks that hold the same elements."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    sharded = as_sharded(gradient)
    if sharded is None:
        return world_size
    axes = zip(sharded.placements, sharded.device_mesh.shape, strict=True)
    holders = math.prod(size for placement, size in axes if not placement.is_replicate())
    return world_size // holders


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that brings a gradient's norm down to at most `max_norm`; 1 if it already is."""
    return min(1.0, max_norm / (norm + EPSILON))
