"""Says what filled the memory of a device when it ran out, and whether another attempt has a chance."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import torch

from parallel.engine import CheckpointTensor
from parallel.fragments import FlatFragment
from parallel.sharded import local_part
from train.errors import DeviceMemoryError, ExhaustedError
from train.health.exhausted import memory_ran_out, planned

GIB = 2**30


@contextmanager
def memory_breakdown(
    state: Callable[[], Mapping[str, CheckpointTensor]], has_progressed: Callable[[], bool]
) -> Generator[None]:
    """Replace torch's error about a full device by one line with the breakdown of its memory.

    DeviceMemoryError before the attempt has finished a step: the same command would fail again. ExhaustedError
    afterwards. `state`: the engine's tensors by name."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        breakdown = describe(memory_stats(), held_bytes(state()))
        kind = ExhaustedError if has_progressed() else DeviceMemoryError
        raise kind(memory_ran_out(error, breakdown)) from error


def memory_stats() -> dict[str, int]:
    """Return the allocator's figures of this rank's device, and the device's size and free bytes. {} without one."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    free, total = torch.cuda.mem_get_info()
    return {**torch.cuda.memory_stats(), "free": free, "total": total}


def held_bytes(state: Mapping[str, CheckpointTensor]) -> dict[str, int]:
    """Return the bytes that this rank holds of an engine's tensors, by the first part of their names."""
    held: dict[str, int] = {}
    for name, tensor in state.items():
        kind = name.partition(".")[0]
        held[kind] = held.get(kind, 0) + _local_bytes(tensor)
    return held


def _local_bytes(tensor: CheckpointTensor) -> int:
    return tensor.flat.nbytes if isinstance(tensor, FlatFragment) else local_part(tensor).nbytes


def describe(stats: Mapping[str, int], held: Mapping[str, int]) -> str:
    """Return what fills the device, in GiB; "" without figures. `stats`: see `memory_stats`; `held`: `held_bytes`."""
    if not stats:
        return ""
    allocated, reserved = stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
    parts = {
        "weights": held.get("model", 0),
        "optimizer state": held.get("optim", 0),
        "gradients, activations and buffers": allocated - held.get("model", 0) - held.get("optim", 0),
        "reserved and unused": reserved - allocated,
        "other processes and libraries": stats["total"] - stats["free"] - reserved,
        "free": stats["free"],
    }
    plan = planned()
    listed = ", ".join(f"{name} {max(size, 0) / GIB:.2f}{plan.beside(name)}" for name, size in parts.items())
    retries = stats.get("num_alloc_retries", 0)
    return f"of {stats['total'] / GIB:.2f} GiB: {listed}; {retries} retries of the allocator"
