"""Speeds of this machine, and of the network between ranks, for `keepstep doctor --measure`."""

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launch.doctor.machine import write_speed
from launch.terminal import size
from parallel.environ import World

BYTES = 1 << 26
"""Bytes written to measure a disk, copied to measure memory, and reduced to measure a network."""


def measure(folder: Path, world: World) -> dict[str, float]:
    """Return figures of this machine, and of an all-reduce among the ranks of a launcher. Collective.

    Names end in their unit; `folder` is on the disk that is measured."""
    import torch

    from train.model.flops import measure_matmul_peak

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures = {
        "devices": float(torch.cuda.device_count()),
        "matmul_bf16_flops_per_second": measure_matmul_peak(device, torch.bfloat16),
        "copy_bytes_per_second": _copy_bytes_per_second(device),
        "memory_bytes": float(
            torch.cuda.get_device_properties(device).total_memory  # pyright: ignore
            if device.type == "cuda"
            else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        ),
    }
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".keepstep-doctor-") as file:
        figures["disk_write_bytes_per_second"] = write_speed(file, BYTES)
    return figures | _all_reduce_bandwidth(world)


def readable(figures: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return names and values with units, for people."""
    names = {
        "devices": "GPUs",
        "matmul_bf16_flops_per_second": "matrix products in bf16",
        "copy_bytes_per_second": "memory copy",
        "memory_bytes": "memory of the device",
        "disk_write_bytes_per_second": "disk write",
        "ranks": "ranks",
        "all_reduce_bytes_per_second": "all-reduce",
    }
    return [(names.get(name, name), _with_unit(name, value)) for name, value in figures.items()]


def _with_unit(name: str, value: float) -> str:
    if name.endswith("flops_per_second"):
        return f"{value / 1e12:.3g} TFLOP/s"
    if name.endswith("bytes_per_second"):
        return f"{size(value)}/s"
    if name.endswith("bytes"):
        return size(value)
    return f"{value:g}"


def _best_seconds(act: Callable[[], object], result: Any, tries: int) -> float:
    """Return the shortest time of `act` until the device has computed the tensor `result`."""
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        act()
        result[0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return best


def _copy_bytes_per_second(device: Any) -> float:
    """Return the memory bandwidth of a copy; each byte counts once for the read and once for the write."""
    import torch

    source = torch.ones(BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * BYTES / _best_seconds(lambda: target.copy_(source), target, 5)


def _all_reduce_bandwidth(world: World) -> dict[str, float]:
    """Return the ranks and the bytes per second of an all-reduce, empty for one rank. Collective.

    A ring sends `2 (n - 1) / n` of the tensor through each of n ranks."""
    import torch
    import torch.distributed as dist

    from parallel.bootstrap import start
    from parallel.config import ParallelConfig
    from parallel.mpi import meet

    world = meet(world)
    if world.world_size == 1:
        return {}
    runtime = start(ParallelConfig(engine="ddp"), world)
    values = torch.ones(BYTES // 4, device=runtime.device)
    best = _best_seconds(lambda: dist.all_reduce(values), values, 4)  # pyright: ignore  # the first one connects
    dist.destroy_process_group()
    share = 2 * (world.world_size - 1) / world.world_size
    return {"ranks": float(world.world_size), "all_reduce_bytes_per_second": BYTES * share / best}
