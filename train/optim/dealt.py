"""Work on whole matrices that ranks hold parts or copies of, dealt over those ranks.

Each round takes at most one matrix for each rank of the group. Its owner computes the result from the whole matrix.

| the group holds       | to the owner                             | from the owner                          |
| --------------------- | ---------------------------------------- | --------------------------------------- |
| one copy, cut up      | each rank sends its part: one all-to-all | each rank gets its part: one all-to-all |
| a copy on every rank  | nothing                                  | a broadcast of each result              |

In a round of an all-to-all a rank sends and receives no more than about one whole matrix, so memory does not grow with
the number of ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.sharded import Box, as_sharded, box_of


@dataclass(frozen=True)
class Holders:
    """The ranks over which a matrix is dealt."""

    group: Any
    """Process group; None for one process alone."""
    size: int
    """Number of ranks of the group."""
    rank: int
    """This rank's number in the group."""
    boxes: tuple[Box, ...] | None
    """What each rank holds, in order; None if each holds the whole."""


ALONE = Holders(None, 1, 0, None)


def holders_of(matrix: Tensor) -> Holders:
    """The ranks that together hold one copy of a matrix; those that hold copies, if it is not cut. Collective once."""
    if not dist.is_initialized():
        return ALONE
    sharded = as_sharded(matrix)
    if sharded is None:
        return Holders(dist.group.WORLD, dist.get_world_size(), dist.get_rank(), None)
    mesh, placements = sharded.device_mesh, sharded.placements
    wide = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    cut = [axis for axis in wide if not placements[axis].is_replicate()]
    axes = cut or wide
    if not axes:
        return ALONE
    names = [(mesh.mesh_dim_names or ())[axis] for axis in axes]
    group = mesh.get_group(names[0]) if len(names) == 1 else mesh[tuple(names)]._flatten("_".join(names)).get_group()
    sizes = [mesh.shape[axis] for axis in axes]
    boxes = None
    if cut:
        along = [dict(zip(axes, at, strict=True)) for at in _coordinates(sizes)]
        boxes = tuple(box_of(sharded, [at.get(axis, 0) for axis in range(mesh.ndim)]) for at in along)
    return Holders(group, math.prod(sizes), dist.get_rank(group), boxes)


def _coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The coordinates of the ranks of a mesh, in order of rank."""
    return [tuple(at) for at in torch.cartesian_prod(*map(torch.arange, sizes)).view(-1, len(sizes)).tolist()]


def rounds(matrices: Sequence[Tensor], ranks: int) -> Iterator[list[Tensor]]:
    """The matrices, the largest first, in rounds of at most one for each rank.

    So the shares of any two ranks differ by less than the largest matrix."""
    ordered = sorted(matrices, key=lambda matrix: -work_of(matrix.shape))
    for first in range(0, len(ordered), ranks):
        yield ordered[first : first + ranks]


def work_of(shape: Sequence[int]) -> int:
    """FLOP of making a matrix orthogonal, up to a factor."""
    return math.prod(shape) * min(shape)


def deal(
    parts: Sequence[Tensor], shapes: Sequence[torch.Size], holders: Sequence[Holders], work: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Apply `work` to the matrices of one round; yields this rank's part of each result. Collective.

    `parts`: what this rank holds of each matrix. Results have their dtype. All matrices have the same group."""
    one = holders[0]
    if one.boxes is None:
        for owner, part in enumerate(parts):
            result = work(part).contiguous() if owner == one.rank else torch.empty_like(part)
            if one.size > 1:
                dist.broadcast(result, group=one.group, group_src=owner)
            yield result
        return
    boxes = holders[one.rank].boxes or () if one.rank < len(parts) else ()  # of the matrix that this rank gets
    results: list[Tensor] = []
    whole = parts[0].new_empty(shapes[one.rank] if boxes else 0)
    pieces = _swap(parts, [whole[box].numel() for box in boxes], one, parts[0])
    if boxes:
        for box, piece in zip(boxes, pieces, strict=True):
            whole[box].copy_(piece.view(whole[box].shape))
        result = work(whole)
        results = [result[box] for box in boxes]
    for part, piece in zip(parts, _swap(results, [part.numel() for part in parts], one, parts[0]), strict=False):
        yield piece.view(part.shape)


def _swap(sent: Sequence[Tensor], sizes: Sequence[int], holders: Holders, like: Tensor) -> Sequence[Tensor]:
    """Send one tensor to each of the first ranks; returns those that the first ranks sent, flat. Collective.

    `sizes`: number of elements that each of them sent. `like` has the dtype and the device."""
    numbers = [*(tensor.numel() for tensor in sent), *[0] * (holders.size - len(sent))]
    sizes = [*sizes, *[0] * (holders.size - len(sizes))]
    outgoing = torch.cat([tensor.reshape(-1) for tensor in sent]) if sent else like.new_empty(0)
    incoming = like.new_empty(sum(sizes))
    dist.all_to_all_single(incoming, outgoing, sizes, numbers, group=holders.group)
    return incoming.split(sizes)
