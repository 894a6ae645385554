"""DTensors, recognized without importing them: the import takes half a second, and single and DDP use none."""

import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Box = tuple[slice, ...]
"""The rows, columns and so on of a whole tensor that a rank holds."""


def as_sharded(tensor: Tensor) -> "DTensor | None":
    """The tensor if it is a DTensor, else None. A DTensor exists only if torch's module has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return cast("DTensor", tensor) if module is not None and isinstance(tensor, module.DTensor) else None


def local_part(tensor: Tensor) -> Tensor:
    """The elements that this rank holds."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else _unwrapped(sharded.to_local())


def plain(tensor: Tensor) -> Tensor:
    """The tensor without torchao's wrapper around its elements, in the same memory. Not differentiable."""
    sharded = as_sharded(tensor)
    if sharded is None or _unwrapped(held := sharded.to_local()) is held:
        return tensor
    size, stride = sharded.size(), sharded.stride()
    return type(sharded).from_local(
        _unwrapped(held), sharded.device_mesh, sharded.placements, run_check=False, shape=size, stride=stride
    )


def _unwrapped(local: Tensor) -> Tensor:
    """The fp32 tensor inside the one that FSDP2 gathers in fp8 (`parallel/engines/fp8.py`); others as they are."""
    module = sys.modules.get("torchao.float8.fsdp_utils")
    is_wrapper = module is not None and isinstance(local, module.WeightWithDynamicFloat8CastTensor)
    return cast("Any", local)._tensor if is_wrapper else local


def whole_of(tensor: Tensor) -> Tensor:
    """All elements, gathered or added up from the ranks of a DTensor. Collective for a DTensor."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.full_tensor()


def box_of(sharded: "DTensor", coordinate: Sequence[int] | None = None) -> Box:
    """The rows, columns and so on of the whole that a rank holds. `coordinate`: in the mesh; by default this rank's."""
    mesh = sharded.device_mesh
    at = tuple(coordinate if coordinate is not None else mesh.get_coordinate() or ())
    return _box(tuple(sharded.shape), tuple(mesh.shape), at, tuple(sharded.placements))


@cache
def _box(shape: tuple[int, ...], mesh: tuple[int, ...], at: tuple[int, ...], placements: tuple[Any, ...]) -> Box:
    """`box_of`, cached: torch takes 10 ms where two axes cut one dimension, and many parameters have the same shape."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(at), placements)
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
