"""The arrangement of the ranks of a run: three axes whose product is the world size. Pure functions of integers.

| axis        | ranks along the axis                                                   |
| ----------- | ---------------------------------------------------------------------- |
| `replicate` | hold replicas of the parameters and see different data                 |
| `shard`     | hold a part of each parameter (or of its state) and see different data |
| `tensor`    | compute a part of each matrix product on the same data                 |

`tensor` varies fastest, then `shard`, then `replicate`: the ranks along `tensor` exchange most, so they are neighbours.
"""

import math
from dataclasses import asdict, dataclass

from parallel.config import ParallelConfig
from parallel.errors import LaunchError


@dataclass(frozen=True)
class Layout:
    """Number of ranks along each axis, from the axis that varies slowest to the one that varies fastest."""

    replicate: int
    shard: int
    tensor: int

    @property
    def axes(self) -> dict[str, int]:
        """Number of ranks along each axis, by name, in the same order."""
        return asdict(self)

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return math.prod(self.axes.values())

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or of groups of tensor-parallel peers, that see different data."""
        return self.replicate * self.shard

    @property
    def same_data_ranks(self) -> int:
        """Number of ranks that see the same data: tensor-parallel peers."""
        return self.world_size // self.data_parallel_size

    def data_parallel_rank(self, rank: int) -> int:
        """Index of the data that a rank sees. Ranks that see the same data are neighbours."""
        return rank // self.same_data_ranks

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of a rank along each axis."""
        sizes = list(self.axes.values())
        return tuple(rank // math.prod(sizes[index + 1 :]) % size for index, size in enumerate(sizes))


def resolve_layout(config: ParallelConfig, world_size: int) -> Layout:
    """The layout, with -1 replaced by the remaining ranks. Raises LaunchError if the recipe does not fit the ranks."""
    tensor, replicate = config.tensor, config.replicate
    if config.engine == "single":
        if world_size != 1:
            raise LaunchError(
                f"parallel.engine single runs in one process, but {world_size} ranks were started; "
                "set parallel.engine to ddp, or start one rank"
            )
        return Layout(1, 1, 1)
    if world_size % tensor:
        raise LaunchError(
            f"the world size ({world_size}) must be a multiple of parallel.tensor ({tensor}); "
            f"start {_neighbours(world_size, tensor)} ranks or change parallel.tensor"
        )
    ranks = world_size // tensor
    if config.engine == "ddp":
        return Layout(ranks, 1, tensor)
    shard = config.shard if config.shard != -1 else ranks // replicate
    if replicate * shard != ranks or shard == 0:
        whole = replicate * tensor * (config.shard if config.shard != -1 else 1)
        way_out = f"start {_neighbours(world_size, whole)} ranks"
        if config.shard != -1:
            way_out = "set parallel.shard to -1 to use the remaining ranks, or start as many ranks as the product"
        raise LaunchError(
            f"parallel.replicate ({replicate}) x parallel.shard ({config.shard}) x parallel.tensor ({tensor}) "
            f"does not make the world size ({world_size}); {way_out}"
        )
    return Layout(replicate, shard, tensor)


def _neighbours(value: int, multiple_of: int) -> str:
    """The multiples just below and just above a value, in words."""
    below = value // multiple_of * multiple_of
    return " or ".join(str(n) for n in (below, below + multiple_of) if n)
