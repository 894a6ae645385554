"""The rendezvous of ranks that mpirun started: MPI gives their numbers, and rank 0 picks the address and port.

`mpirun -n 4 python -m train RECIPE` needs no address and no port. MPI is used for nothing else: gradients go through
torch's own process groups.
"""

import socket
from dataclasses import replace

from parallel.addresses import head_here, listen
from parallel.environ import World
from parallel.errors import LaunchError


def meet(world: World) -> World:
    """The world with its head, port and local ranks filled in. Collective if MPI started the ranks.

    Returns the world unchanged if another launcher started the ranks. Raises LaunchError if mpi4py is missing or
    belongs to another MPI."""
    if world.launcher != "mpi":
        return world
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpirun started {world.world_size} ranks, but mpi4py cannot be imported ({error}); install mpi4py and an "
            "MPI library, or start the ranks with torchrun"
        ) from None
    all_ranks = MPI.COMM_WORLD
    found = all_ranks.Get_rank(), all_ranks.Get_size()
    if found != (world.rank, world.world_size):
        raise LaunchError(
            f"the launcher reports rank {world.rank} of {world.world_size}, but "
            f"{MPI.Get_library_version().split(',')[0]} reports rank {found[0]} of {found[1]}: mpirun (or `srun "
            "--mpi=...`) and mpi4py belong to different MPI libraries; use the mpirun of mpi4py's library, or torchrun"
        )
    node = all_ranks.Split_type(MPI.COMM_TYPE_SHARED)
    is_one_node = all_ranks.allreduce(node.Get_size(), op=MPI.MIN) == all_ranks.Get_size()
    head, port = world.head, world.port
    if not port:
        head, port = all_ranks.bcast(_free_endpoint(is_one_node) if world.rank == 0 else None, root=0)
    world = replace(world, head=head, port=port, local_rank=node.Get_rank(), local_world_size=node.Get_size())
    MPI.Finalize()  # ranks end by os._exit (`parallel.bootstrap.leave`); without this mpirun reports a failure
    return world


def _free_endpoint(is_one_node: bool) -> tuple[str, int]:
    """An address that the other ranks can reach, and a port that is free at the moment."""
    head = "127.0.0.1" if is_one_node else head_here(socket.gethostname())
    with listen(head, 0) as probe:
        return head, probe.getsockname()[1]
