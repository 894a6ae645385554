"""A rank's contiguous piece of a row-major tensor, as ZeRO cuts it, presented to DCP as boxes.

`FlatFragment` implements torch's `_Checkpointable` protocol (`__create_write_items__`, `__create_chunk_list__`,
`__get_tensor_shard__`). So DCP's own planners save and load the piece in place, and nothing is gathered. These methods
import DCP themselves, because it imports DTensor (`parallel.sharded`).
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offsets and sizes in the whole tensor, and the start of the box in the flat piece, all in elements."""


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """At most `max(1, 2 * ndim - 1)` boxes that cover the flat range [start, stop) of a row-major tensor."""
    if stop <= start:
        return []
    if len(shape) == 0:
        return [((), (), 0)]
    if len(shape) == 1:
        return [((start,), (stop - start,), 0)]
    row_size = math.prod(shape[1:])
    first_whole, last_whole = -(-start // row_size), stop // row_size
    if first_whole > last_whole:  # inside one row
        return _in_row(shape, start // row_size, start, stop, start)
    cut = _in_row(shape, first_whole - 1, start, first_whole * row_size, start)
    if last_whole > first_whole:
        rest = shape[1:]
        offsets, sizes = (first_whole,) + (0,) * len(rest), (last_whole - first_whole, *rest)
        cut.append((offsets, sizes, first_whole * row_size - start))
    return cut + _in_row(shape, last_whole, last_whole * row_size, stop, start)


def _in_row(shape: tuple[int, ...], row: int, low: int, high: int, start: int) -> list[Box]:
    """The boxes of the flat range [low, high) within `row`. Positions count from `start`."""
    first = row * math.prod(shape[1:])
    inner = boxes(shape[1:], low - first, high - first)
    return [((row, *offsets), (1, *sizes), low - start + position) for offsets, sizes, position in inner]


class FlatFragment(Tensor):
    """Elements [start, start + flat.numel()) of a row-major tensor of `shape`. `flat` is a view, never a copy."""

    flat: Tensor
    start: int
    boxes: list[Box]

    @staticmethod
    def __new__(cls, flat: Tensor, shape: tuple[int, ...], start: int) -> "FlatFragment":
        """The fragment of a row-major tensor of `shape` that begins at element `start`. `flat` has one dimension."""
        assert flat.dim() == 1, flat.shape
        fragment = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=flat.dtype, device=flat.device)  # pyright: ignore[reportAttributeAccessIssue]
        fragment.flat = flat
        fragment.start = start
        fragment.boxes = boxes(tuple(shape), start, start + flat.numel())
        return fragment

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"FlatFragment(shape={tuple(self.shape)}, start={self.start}, numel={self.flat.numel()})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"only checkpoints read and write a FlatFragment; {func} is not supported")

    def __create_write_items__(self, fqn: str, _: object) -> list["WriteItem"]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list["ChunkStorageMetadata"]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in self.boxes]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> Tensor:
        for offsets, sizes, position in self.boxes:
            if index.offset is not None and tuple(index.offset) == offsets:
                return self.flat.detach().narrow(0, position, math.prod(sizes)).view(sizes)
        raise ValueError(f"no box at {index} in {self!r}")
