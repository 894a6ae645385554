"""Silent corruption: ranks that hold copies of the same tensors compare a hash of them.

What is a copy of what follows from the layout: plain tensors are the same on all ranks, a DTensor's part is the same
on ranks that differ only along axes over which it is replicated. The hash is the sum of the bits, taken as integers, on
the device: exact, the same in any order, and changed by any single flipped bit.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parallel.sharded import as_sharded

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Hashes = dict[str, int]
"""By what is held: the coordinates of the part on the axes that cut it; "" is the whole."""


class CorruptionError(Exception):
    """Copies that must be equal are not."""


def hashes(tensors: Mapping[str, Tensor]) -> Hashes:
    """Of this rank's parts. Synchronises with the device once for each kind of part."""
    sums: dict[str, Tensor] = {}
    for tensor in tensors.values():
        part, local = _part(tensor)
        bits = local.detach().contiguous().view(-1).view(INTEGERS[local.element_size()]).sum(dtype=torch.int64)
        sums[part] = 31 * sums[part] + bits if part in sums else bits
    return {part: int(bits.item()) for part, bits in sums.items()}


def check_replicas(of_ranks: Sequence[Hashes]) -> None:
    """CorruptionError that names the ranks whose copy differs from most. `of_ranks`: by rank."""
    for part in sorted({part for mine in of_ranks for part in mine}):
        held = {rank: mine[part] for rank, mine in enumerate(of_ranks) if part in mine}
        (usual, count), *others = Counter(held.values()).most_common()
        if not others:
            continue
        if count == others[0][1]:
            raise CorruptionError(
                f"ranks {_listed(list(held))} hold copies of the same weights that differ, and no majority tells which "
                "is right (`keepstep prove --replay` can)"
            )
        odd = [rank for rank, value in held.items() if value != usual]
        raise CorruptionError(
            f"rank {_listed(odd)} holds other weights than the {count} ranks that have copies of them: its memory or "
            "its processor is faulty; take that machine out"
        )


def _part(tensor: Tensor) -> tuple[str, Tensor]:
    sharded = as_sharded(tensor)
    if sharded is None:
        return "", tensor
    mesh = sharded.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    assert mesh.mesh_dim_names is not None
    axes = zip(mesh.mesh_dim_names, coordinates, sharded.placements, strict=True)
    cut = [f"{axis}={at}" for axis, at, placement in axes if not placement.is_replicate()]
    return ",".join(cut), sharded.to_local()


def _listed(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
