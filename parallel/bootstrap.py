"""The first and the last moment of a rank: device, process group, mesh and seeds; and leaving in one piece."""

import hashlib
import logging
import os
import random
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel.addresses import address_of, is_loopback, reached_at
from parallel.config import ParallelConfig
from parallel.engines.fp8 import require_fp8
from parallel.environ import World
from parallel.errors import LaunchError
from parallel.host_memory import keep_freed_memory
from parallel.layout import Layout, resolve_layout
from parallel.mesh import build_mesh, data_parallel_group

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runtime:
    """What a rank knows about itself and its peers."""

    world: World
    layout: Layout
    device: torch.device
    mesh: DeviceMesh | None
    """None under the engine `single`, which has no process group."""
    data_parallel_group: dist.ProcessGroup | None
    """The ranks that see different data and are alike otherwise."""

    @property
    def data_parallel_rank(self) -> int:
        return self.layout.data_parallel_rank(self.world.rank)

    @property
    def data_parallel_size(self) -> int:
        return self.layout.data_parallel_size


def start(config: ParallelConfig, world: World) -> Runtime:
    """Pick the device, meet the other ranks, build the mesh. Collective. Raises LaunchError."""
    layout = resolve_layout(config, world.world_size)
    device = choose_device(config.device, world.local_rank)
    if config.precision == "fp8":
        require_fp8(device)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        torch.accelerator.set_device_index(device)
    if config.engine == "single":
        return Runtime(world, layout, device, None, None)
    bind_gloo(world, os.environ)
    _join(world, device, config.timeout_seconds)
    mesh = build_mesh(layout, device.type)
    return Runtime(world, layout, device, mesh, data_parallel_group(mesh))


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank: `auto`, `cpu`, `cuda` or another accelerator. Raises LaunchError if absent."""
    present = torch.accelerator.current_accelerator(check_available=True)
    if name == "cpu" or (name == "auto" and present is None):
        return torch.device("cpu")
    if present is None or name not in ("auto", present.type):
        raise LaunchError(
            f"parallel.device is {name}, but this machine has {present.type if present else 'no accelerator'} "
            f"(torch {torch.__version__}); set parallel.device to auto or cpu"
        )
    if local_rank >= torch.accelerator.device_count():
        raise LaunchError(
            f"local rank {local_rank} has no {present.type} device of its own: this node shows "
            f"{torch.accelerator.device_count()}; start at most that many ranks per node"
        )
    return torch.device(present.type, local_rank)


def bind_gloo(world: World, env: MutableMapping[str, str]) -> None:
    """To the interface that leads to the other nodes. By itself it takes the address that this machine's name stands
    for, often 127.0.1.1, and waits there for ranks that cannot come. LaunchError if no interface can be told."""
    if world.world_size == world.local_world_size or "GLOO_SOCKET_IFNAME" in env:
        return
    address = address_of(world.head)
    if world.head in (address, "localhost") and is_loopback(address):  # all ranks are on this machine
        return
    is_head = world.rank == 0 or is_loopback(address)
    _, env["GLOO_SOCKET_IFNAME"] = reached_at(world.head, world.port, is_head)


def _join(world: World, device: torch.device, timeout_seconds: float) -> None:
    """Join the process group. CPU tensors always travel by gloo, the device's own by its backend (nccl for cuda)."""
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    timeout = timedelta(seconds=timeout_seconds)
    if world.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    head = f"[{world.head}]" if ":" in world.head else world.head
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{head}:{world.port}",
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistError as error:
        raise LaunchError(
            f"rank {world.rank} of {world.world_size} could not meet the others at {head}:{world.port}: {error}; "
            "check that rank 0 runs on that host and that the port is free and not behind a firewall"
        ) from error


def seed_rank(seed: int, runtime: Runtime, step: int = 0) -> None:
    """Seed Python, NumPy and torch for one step: data-parallel ranks differ, tensor-parallel peers agree."""
    key = f"{seed}/{runtime.data_parallel_rank}/{step}".encode()
    value = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def leave(code: int) -> NoReturn:
    """End a rank that is in step with the others. Collective.

    About 3 % of gloo runs that end in the ordinary way abort after their work is done, because a thread of gloo's asks
    for the interpreter when it is gone, and the launcher reports a failure. So: close the groups, flush, leave hard.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    leave_at_once(code)


def leave_at_once(code: int) -> NoReturn:
    """End a rank after an error. No collective: peers may be gone or wait elsewhere. They see the lost connection."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
