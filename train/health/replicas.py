"""Detects silent corruption: ranks that hold replicas of the same tensors compare hashes of them.

The layout decides what is a replica of what. A plain tensor is the same on all ranks. A DTensor's part is the same on
ranks that differ only along axes over which it is replicated; without such an axis it has no replica, and is not read.
The hash is the sum of the bits, read as integers, and is
computed on the device. It is exact, does not depend on the order of summation, and changes with any single flipped bit.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.sharded import as_sharded

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

PartHashes = dict[str, int]
"""Hash of each part that a rank holds. The key is the part's coordinates on the axes that shard it, such as
"shard=1"; "" means whole tensors."""


class CorruptionError(Exception):
    """Replicas that must be equal differ."""


def compare_replicas(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Raise CorruptionError if ranks that hold replicas of the same tensors disagree. Collective.

    The hashes move in one small gather of the device. Without replicas nothing is hashed or sent."""
    if sums := _sums_of_parts({name: tensor for name, tensor in tensors.items() if _has_replicas(tensor)}):
        check_replicas(_gather(sums, device))


def hash_parts(tensors: Mapping[str, Tensor]) -> PartHashes:
    """Hashes of this rank's parts of the tensors. Waits for the device."""
    return {part: int(total.item()) for part, total in _sums_of_parts(tensors).items()}


def _sums_of_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The hash of each part, still on the device. Shape ()."""
    sums: dict[str, Tensor] = {}
    for tensor in tensors.values():
        part, local = _part(tensor)
        bits = local.detach().contiguous().view(-1).view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64)
        sums[part] = 31 * sums[part] + bits if part in sums else bits
    return sums


def _gather(sums: Mapping[str, Tensor], device: torch.device) -> list[PartHashes]:
    """The hashes of all ranks, in order of rank. Parts, of which all ranks have equally many, are named by a number.

    Collective."""
    names = [int.from_bytes(blake2b(part.encode(), digest_size=8).digest(), "big") >> 1 for part in sums]
    own = torch.stack((torch.tensor(names, device=device), torch.stack([total.to(device) for total in sums.values()])))
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)  # pyright: ignore[reportUnknownMemberType]
    rows: list[list[list[int]]] = torch.stack(gathered).tolist()  # pyright: ignore
    return [dict(zip(map(str, parts), hashes, strict=True)) for parts, hashes in rows]


def check_replicas(hashes_by_rank: Sequence[PartHashes]) -> None:
    """CorruptionError that names the ranks whose replica differs from the majority."""
    for part in sorted({part for hashes in hashes_by_rank for part in hashes}):
        values = {rank: hashes[part] for rank, hashes in enumerate(hashes_by_rank) if part in hashes}
        (usual, count), *others = Counter(values.values()).most_common()
        if not others:
            continue
        if count == others[0][1]:
            raise CorruptionError(
                f"ranks {_listed(list(values))} hold different replicas of the same weights, and no majority shows "
                "which is right; `keepstep prove --replay` can find out"
            )
        different = [rank for rank, value in values.items() if value != usual]
        raise CorruptionError(
            f"rank {_listed(different)} holds other weights than the {count} ranks with replicas of them: its memory "
            "or its processor is faulty; remove that machine"
        )


def _has_replicas(tensor: Tensor) -> bool:
    """Whether another rank holds the same elements."""
    sharded = as_sharded(tensor)
    if sharded is None:
        return dist.is_initialized() and dist.get_world_size() > 1
    axes = zip(sharded.placements, sharded.device_mesh.shape, strict=True)
    return any(placement.is_replicate() and size > 1 for placement, size in axes)


def _part(tensor: Tensor) -> tuple[str, Tensor]:
    """Which part of a tensor this rank holds (a key of PartHashes), and the part."""
    sharded = as_sharded(tensor)
    if sharded is None:
        return "", tensor
    mesh = sharded.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    assert mesh.mesh_dim_names is not None
    axes = zip(mesh.mesh_dim_names, coordinates, sharded.placements, strict=True)
    sharding = [f"{axis}={at}" for axis, at, placement in axes if not placement.is_replicate()]
    return ",".join(sharding), sharded.to_local()


def _listed(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
