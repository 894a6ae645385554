"""DTensors, recognized without importing them: the import takes half a second, and single and DDP use none."""

import sys
from typing import TYPE_CHECKING, cast

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def as_sharded(tensor: Tensor) -> "DTensor | None":
    """The tensor if it is a DTensor, else None. A DTensor exists only if torch's module has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return cast("DTensor", tensor) if module is not None and isinstance(tensor, module.DTensor) else None


def local_part(tensor: Tensor) -> Tensor:
    """The elements that this rank holds."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def whole_of(tensor: Tensor) -> Tensor:
    """All elements, gathered or added up from the ranks of a DTensor. Collective for a DTensor."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.full_tensor()


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's elements of a tensor that every rank has, cut as `like` is. Not collective."""
    sharded = as_sharded(like)
    if sharded is None:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None).to_local()
