"""How the ranks of a run are arranged: three axes whose product is the world size. Pure: integers in, a `Layout` out.

| axis        | ranks along it                                                       |
| ----------- | -------------------------------------------------------------------- |
| `replicate` | hold equal copies of the parameters and see different data           |
| `shard`     | hold a part of each parameter (or of its state) and see different data |
| `tensor`    | compute a part of each matrix product on the same data               |

`tensor` varies fastest, so that its ranks, which talk most, are neighbours; then `shard`, then `replicate`.
"""

from dataclasses import dataclass

from parallel.config import ParallelConfig
from parallel.errors import LaunchError


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis."""

    replicate: int
    shard: int
    tensor: int

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of tensor-parallel peers, that see different data."""
        return self.replicate * self.shard

    def data_parallel_rank(self, rank: int) -> int:
        """The same for tensor-parallel peers."""
        return rank // self.tensor


def resolve_layout(config: ParallelConfig, world_size: int) -> Layout:
    """Fill in the axis that is left open. Raises LaunchError if the recipe does not fit the number of ranks."""
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
    below = value // multiple_of * multiple_of
    return " or ".join(str(n) for n in (below, below + multiple_of) if n)
