"""Start and end of a rank: device, process group, mesh and seeds; and how the process exits."""

import hashlib
import logging
import os
import random
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel.addresses import LOOPBACK, address_of, is_loopback, listen, meeting_point, on_one_machine, reached_at
from parallel.config import ParallelConfig
from parallel.engines.fp8 import require_fp8
from parallel.environ import World
from parallel.errors import LaunchError
from parallel.host_memory import keep_freed_memory
from parallel.layout import Layout, resolve_layout
from parallel.mesh import build_mesh, data_parallel_group, limit_collectives
from parallel.nvidia import bind_near_gpu, record_nccl, warn_of_sockets

log = logging.getLogger(__name__)

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that restrict which devices a process sees."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interfaces of the two backends."""

RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_ENABLE_TIMING": "1"}
"""Variables that switch torch's flight recorder on: it keeps the newest collectives of each rank, and whether the
device has started them. The watchdog reads it when a run hangs."""


@dataclass(frozen=True)
class Runtime:
    """A rank's device, its place among the ranks, and its process groups."""

    world: World
    layout: Layout
    device: torch.device
    mesh: DeviceMesh | None
    """None under the engine `single`, which has no process group."""
    data_parallel_group: dist.ProcessGroup | None
    """The ranks that see different data and have this rank's position on the `tensor` axis."""

    @property
    def data_parallel_rank(self) -> int:
        """Index of the data that this rank sees."""
        return self.layout.data_parallel_rank(self.world.rank)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or of groups of tensor-parallel peers, that see different data."""
        return self.layout.data_parallel_size


def start(config: ParallelConfig, world: World) -> Runtime:
    """Choose the device, join the process group and build the mesh. Collective.

    Raises LaunchError if the ranks, the device or the rendezvous do not fit."""
    layout = resolve_layout(config, world.world_size)
    device = choose_device(config.device, world.local_rank, own_device=sees_own_device(world, os.environ))
    if config.engine.startswith("zero"):  # DeepSpeed reads it, but srun and most kinds of MPI do not set it
        os.environ["LOCAL_RANK"] = str(world.local_rank if device.index is None else device.index)
    if config.precision == "fp8":
        require_fp8(device)
    _require_cuda(config, layout, world, device)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        torch.accelerator.set_device_index(device)
    if device.type == "cuda":
        bind_near_gpu(device)
    if config.engine == "single":
        return Runtime(world, layout, device, None, None)
    bind_interfaces(world, os.environ)
    nccl_output = record_nccl(world, os.environ) if device.type == "cuda" else None
    _join(world, device, config.timeout_seconds)
    warn_of_sockets(nccl_output, world)
    mesh = build_mesh(layout, device.type)
    group = data_parallel_group(mesh)
    limit_collectives(config.timeout_seconds)
    return Runtime(world, layout, device, mesh, group)


def _require_cuda(config: ParallelConfig, layout: Layout, world: World, device: torch.device) -> None:
    """Raise LaunchError if a setting is for CUDA alone and the device or the node does not fit it."""
    for name in ("cuda_graphs", "async_tensor"):
        if getattr(config, name) and device.type != "cuda":
            raise LaunchError(
                f"parallel.{name} (true) needs a CUDA device, but this rank has {device}; set parallel.{name} to false"
            )
    if config.async_tensor and world.local_world_size % layout.tensor:
        raise LaunchError(
            f"parallel.async_tensor (true) needs all ranks of the tensor axis on one node, but parallel.tensor is "
            f"{layout.tensor} and a node has {world.local_world_size} ranks; set parallel.async_tensor to false, or "
            "parallel.tensor to a divisor of the ranks of a node"
        )


def sees_own_device(world: World, env: Mapping[str, str]) -> bool:
    """Whether the launcher shows each rank its own devices only, as Slurm does with `--gpus-per-task=1`.

    torchrun and DeepSpeed's launcher show all devices to all ranks."""
    return world.launcher in ("slurm", "mpi", "env") and any(name in env for name in VISIBLE_DEVICES)


def choose_device(name: str, local_rank: int, own_device: bool = False) -> torch.device:
    """The device of this rank. `name` is `auto`, `cpu`, `cuda` or another accelerator.

    With `own_device`, a single visible device is this rank's own. Raises LaunchError if the machine has no such device
    for this rank."""
    present = torch.accelerator.current_accelerator(check_available=True)
    if name == "cpu" or (name == "auto" and present is None):
        return torch.device("cpu")
    if present is None or name not in ("auto", present.type):
        raise LaunchError(
            f"parallel.device is {name}, but this machine has {present.type if present else 'no accelerator'} "
            f"(torch {torch.__version__}); set parallel.device to auto or cpu"
        )
    if own_device and torch.accelerator.device_count() == 1:
        return torch.device(present.type, 0)
    if local_rank >= torch.accelerator.device_count():
        raise LaunchError(
            f"local rank {local_rank} has no {present.type} device: this node has "
            f"{torch.accelerator.device_count()}; start at most that many ranks per node"
        )
    return torch.device(present.type, local_rank)


def bind_interfaces(world: World, env: MutableMapping[str, str]) -> None:
    """Make gloo and NCCL use loopback if all ranks are on this machine, else the interface towards the other nodes.

    By default gloo uses the address of this machine's name, often 127.0.1.1, which other nodes cannot reach, and other
    machines can reach what needs no network. Changes `env`, but no variable that it has. Raises LaunchError if the
    interface cannot be found, or if `env` names loopback."""
    if on_one_machine(world):
        for name in INTERFACES:
            env.setdefault(name, LOOPBACK)
        return
    if world.head == "localhost":
        return
    for name in INTERFACES:
        if LOOPBACK in env.get(name, "").removeprefix("=").split(","):  # NCCL takes `=eth0` for exactly eth0
            raise LaunchError(
                f"{name} ({env[name]}) names the loopback interface, but the {world.world_size} ranks are on several "
                "machines, which it does not connect; unset it, or set it to the interface towards the other nodes"
            )
    if "GLOO_SOCKET_IFNAME" not in env:
        is_head = world.rank == 0 or is_loopback(address_of(world.head))
        _, env["GLOO_SOCKET_IFNAME"] = reached_at(world.head, world.port, is_head)


def _join(world: World, device: torch.device, timeout_seconds: float) -> None:
    """Join the process group: gloo for CPU tensors, the device's backend (nccl for cuda) for its own. Collective."""
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    for name, value in RECORDER.items():
        os.environ.setdefault(name, value)
    timeout = timedelta(seconds=timeout_seconds)
    if world.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    try:
        store = _store(world, timeout)
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout, device_id=device_id
        )
    except (OSError, RuntimeError) as error:
        is_gloo = "Gloo connectFullMesh failed" in str(error)  # a plain RuntimeError
        if not is_gloo and not isinstance(error, OSError | dist.DistError):
            raise
        reason = str(error).splitlines()[0]  # the rest is a stack of C++ frames
        head = f"[{world.head}]" if ":" in world.head else world.head
        way_out = "check that rank 0 runs on that host and that the port is free and not behind a firewall"
        if is_gloo:
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
            way_out = f"check that GLOO_SOCKET_IFNAME ({interface}) connects the machines, without a firewall"
        raise LaunchError(
            f"rank {world.rank} of {world.world_size} could not connect to the other ranks at {head}:{world.port}: "
            f"{reason}; {way_out}"
        ) from None


def _store(world: World, timeout: timedelta) -> dist.Store:
    """The store through which the ranks find each other. Rank 0 serves it, unless torchrun does. Collective."""
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, is_certain = (world.head, False) if of_torchrun else meeting_point(world)
    is_server, server = world.rank == 0 and not of_torchrun, None
    if not is_server:
        _wait_for_rank_0(host, world.port, timeout.total_seconds())
    elif is_certain:
        server = listen(host, world.port).detach()
    else:  # such as behind address translation
        log.warning("rank 0 listens on all interfaces: %s is not an address of this machine", world.head)
    size = None if of_torchrun else world.world_size
    store = dist.TCPStore(host, world.port, size, is_server, timeout, master_listen_fd=server)
    return dist.PrefixStore("default_pg", store)


def _wait_for_rank_0(host: str, port: int, timeout_seconds: float) -> None:
    """Wait until rank 0 listens. Raises OSError: torch's own client would print a page of C++ frames."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(
                    f"rank 0 does not answer after {timeout_seconds:.0f} s ({error.strerror or error})"
                ) from None
        time.sleep(0.1)


def seed_rank(seed: int, runtime: Runtime, step: int = 0) -> None:
    """Seed Python, NumPy and torch for one step. The seed differs by data-parallel rank, not among tensor peers."""
    key = f"{seed}/{runtime.data_parallel_rank}/{step}".encode()
    value = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def leave(code: int) -> NoReturn:
    """Exit with a code when all ranks exit together. Collective.

    With an ordinary exit, about 3 % of gloo runs crash after their work is done, because a thread of gloo uses the
    interpreter after it has gone. The launcher would report a failure. So this closes the groups and skips the
    interpreter's own exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
    leave_at_once(code)


def leave_at_once(code: int) -> NoReturn:
    """Exit with a code after an error. Not collective: peers may be gone or wait in another collective.

    They notice the lost connection."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
