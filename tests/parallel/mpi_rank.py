"""One rank under mpirun or srun: prints its rank and the sum of all ranks, computed by torch's own process group."""

import os
import sys

from parallel.environ import read_world
from parallel.errors import LaunchError
from parallel.mpi import meet

try:
    world = meet(read_world(os.environ))
except LaunchError as error:
    print(f"LaunchError: {error}", flush=True)
    sys.exit(error.exit_code)

import torch
import torch.distributed as dist

address = f"tcp://{world.head}:{world.port}"
dist.init_process_group("gloo", init_method=address, rank=world.rank, world_size=world.world_size)
total = torch.tensor([float(world.rank)])
dist.all_reduce(total)
dist.destroy_process_group()
local = f"local {world.local_rank} of {world.local_world_size}"
print(f"rank {world.rank} of {world.world_size} {local} sum {total.item()}\n", end="", flush=True)
