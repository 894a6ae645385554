"""Ranks that mpirun started: MPI itself says who they are, and rank 0 picks the port where they meet.

`mpirun -n 4 python -m train RECIPE` needs no address and no port. MPI is used for nothing else: gradients travel
through torch's own groups.
"""

import socket
from dataclasses import replace

from parallel.addresses import head_here
from parallel.environ import World
from parallel.errors import LaunchError


def meet(world: World) -> World:
    """The world with its head, port and places on the node filled in. Collective, unless MPI didn't start us."""
    if world.launcher != "mpi":
        return world
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpirun started {world.world_size} ranks, but mpi4py cannot be loaded ({error}); install it with an MPI "
            "library, or start with torchrun"
        ) from None
    everyone = MPI.COMM_WORLD
    found = everyone.Get_rank(), everyone.Get_size()
    if found != (world.rank, world.world_size):
        raise LaunchError(
            f"the launcher says rank {world.rank} of {world.world_size}, but {MPI.Get_library_version().split(',')[0]} "
            f"says rank {found[0]} of {found[1]}: mpirun (or `srun --mpi=...`) and mpi4py belong to different MPIs; "
            "use the mpirun of mpi4py's library, or torchrun"
        )
    on_node = everyone.Split_type(MPI.COMM_TYPE_SHARED)
    alone = everyone.allreduce(on_node.Get_size(), op=MPI.MIN) == everyone.Get_size()
    head, port = world.head, world.port
    if not port:
        head, port = everyone.bcast(_free_endpoint(alone) if world.rank == 0 else None, root=0)
    world = replace(world, head=head, port=port, local_rank=on_node.Get_rank(), local_world_size=on_node.Get_size())
    MPI.Finalize()  # ranks leave hard (`parallel.bootstrap.leave`), which mpirun forgives only after this
    return world


def _free_endpoint(one_node: bool) -> tuple[str, int]:
    """A port that was free just now, at an address that the others reach."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return ("127.0.0.1" if one_node else head_here(socket.gethostname())), port
