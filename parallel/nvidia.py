"""What a rank with an NVIDIA GPU needs from its machine: the CPUs near the GPU, and a fast network for NCCL."""

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import torch

from parallel.environ import World, expand_cpus

log = logging.getLogger(__name__)

PCI = Path("/sys/bus/pci/devices")


def bind_near_gpu(device: torch.device) -> None:
    """Let this process use only CPUs of the GPU's NUMA node. Threads that start later inherit this.

    Memory and kernel launches then take the short way. Does nothing if the machine does not say which CPUs these are,
    or if a launcher has bound the process to others."""
    properties = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    if cpus := near_cpus(address, os.sched_getaffinity(0)):
        os.sched_setaffinity(0, cpus)
        log.info("bound to %d CPUs near the GPU %s", len(cpus), address)


def near_cpus(address: str, allowed: set[int], devices: Path = PCI) -> set[int]:
    """The allowed CPUs in the NUMA node of a PCI device; empty if they are unknown. Raises nothing."""
    try:
        return expand_cpus((devices / address / "local_cpulist").read_text(encoding="ascii")) & allowed
    except (OSError, ValueError):
        return set()


def record_nccl(world: World, env: MutableMapping[str, str]) -> Path | None:
    """Let NCCL write to a file what it chooses, through variables in `env`. None if there is nothing to watch.

    Only a run on several nodes uses a network. A user who sets NCCL_DEBUG reads the choice himself."""
    if world.world_size == world.local_world_size or "NCCL_DEBUG" in env or "NCCL_DEBUG_FILE" in env:
        return None
    file = Path(tempfile.gettempdir(), f"keepstep-nccl-{os.getpid()}.log")
    env.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(file)})
    return file


def warn_of_sockets(file: Path | None, world: World) -> None:
    """Warn on one rank of each node if NCCL chose TCP, and remove the file. Call after the process group has begun."""
    if file is None:
        return
    with contextlib.suppress(OSError):
        text = file.read_text(encoding="utf-8", errors="replace")
        file.unlink()
        if world.local_rank == 0 and (warning := socket_warning(text)):
            log.warning("%s", warning)


def socket_warning(text: str) -> str:
    """The warning if NCCL's output says that it exchanges data between nodes over TCP; else "".

    NCCL before 2.27 writes `Using network Socket`, later ones `Assigned NET plugin Socket to comm`."""
    chosen = re.findall(r"(?:Using network|Assigned NET plugin) (\S+)", text)
    if not chosen or chosen[-1].lower() != "socket":
        return ""
    interface = re.search(r"NET/Socket\s*: Using (\[0\][^:\s]+)", text)
    reason = re.search(r"NCCL (?:INFO|WARN) ((?:NET/IB|Failed to open lib|Plugin)[^\n]*)", text)
    told = [f"over {interface[1].removeprefix('[0]')}"] if interface else []
    told += [f"NCCL says: {reason[1].strip()}"] if reason else []
    return (
        f"NCCL uses TCP between the nodes ({'; '.join(told) or 'Socket'}), which is many times slower than RDMA; "
        "install libibverbs and its providers, make /dev/infiniband visible in the container (Kubernetes: --rdma), "
        "unset NCCL_IB_DISABLE, and see `keepstep doctor`"
    )
