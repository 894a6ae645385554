"""The few collectives that the training loop needs by itself. At one rank without a process group each is a no-op.

Small values travel as CPU tensors; `bootstrap` gives every run a group that carries them beside the device's own.
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
    """Whether it holds on any rank. Collective."""
    return bool(sum_over_ranks(torch.tensor(int(flag))).item())


def broadcast_from_rank0(value: T) -> T:
    """Rank 0's value on every rank; it must be picklable. Collective."""
    if not dist.is_initialized():
        return value
    carrier = [value]
    dist.broadcast_object_list(carrier, src=0, device=torch.device("cpu"))
    return carrier[0]


def gather_objects(value: T) -> list[T]:
    """The values of all ranks, by rank, on every rank; they must be picklable. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # pyright: ignore[reportReturnType]
