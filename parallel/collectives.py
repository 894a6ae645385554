"""The few collectives that the training loop calls directly. Without a process group, in a single process, they do
nothing.

Small values move as CPU tensors: `bootstrap` gives every run a group that carries them beside those of the device.
"""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over the ranks of the group (default: all), as a new tensor with the same bits on each. Collective."""
    total = tensor.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
    return total


def any_rank(flag: bool) -> bool:
    """Whether the flag is true on any rank. Collective."""
    return bool(sum_over_ranks(torch.tensor(int(flag))).item())


def gather_objects(value: T) -> list[T]:
    """The values of all ranks, in order of rank, on every rank. They must be picklable. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # pyright: ignore[reportReturnType]
