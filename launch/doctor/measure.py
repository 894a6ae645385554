"""Speeds of this machine, and of the network between ranks, for `keepstep doctor --measure`."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.doctor.finding import Finding
from launch.doctor.machine import write_speed
from launch.terminal import size
from parallel.environ import World

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
DEVICE_SHARE = 0.85
"""Least speed of a machine's slowest GPU, as a share of the fastest."""
PORT_SHARE = 0.1
"""Least bandwidth of a collective, as a share of one RDMA port's rate. RDMA gives several times that, TCP less."""
BYTES = 1 << 26
"""Bytes written to measure a disk, copied to measure memory, and reduced to measure a network."""


def measure(folder: Path, world: World) -> dict[str, float]:
    """Return figures of this machine, and of an all-reduce among the ranks of a launcher. Collective.

    Names end in their unit; `folder` is on the disk that is measured."""
    import torch

    from train.model.flops import measure_matmul_peak

    count = torch.cuda.device_count()
    devices = [torch.device("cuda", number) for number in range(count)] or [torch.device("cpu")]
    speeds = [measure_matmul_peak(each, torch.bfloat16) for each in devices]
    device = devices[0]
    figures = {
        "devices": float(count),
        "matmul_bf16_flops_per_second": min(speeds),
        "slowest_of_fastest_device": min(speeds) / max(speeds),
        "copy_bytes_per_second": min(map(_copy_bytes_per_second, devices)),
        "memory_bytes": float(
            torch.cuda.get_device_properties(device).total_memory  # pyright: ignore
            if device.type == "cuda"
            else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        ),
    }
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".keepstep-doctor-") as file:
        figures["disk_write_bytes_per_second"] = write_speed(file, BYTES)
    return figures | _bandwidths(world)


def as_machine(figures: Mapping[str, float], *, has_16_bits: bool) -> dict[str, Any]:
    """Return the figures as a machine of `keepstep plan --machines`. `has_16_bits`: products in bf16 are fast.

    Without a measured all-reduce, an exchange is assumed to read and write each byte four times."""
    tflops = round(figures["matmul_bf16_flops_per_second"] / 1e12, 4)
    bandwidth = figures["copy_bytes_per_second"]
    link = figures.get("all_reduce_bytes_per_second", bandwidth / 8)
    speeds = {"bf16": tflops} if has_16_bits else {"fp32": tflops}
    return {
        "cpu": not figures["devices"],
        "memory_gb": round(figures["memory_bytes"] / 1e9, 2),
        "memory_tb_s": round(bandwidth / 1e12, 5),
        "peak_tflops": speeds,
        "best_tflops": speeds,
        "generation": "measured",
        "link_gb_s": round(link / 1e9, 3),
        "domain": int(figures.get("ranks", max(1, figures["devices"]))),
        "network_gb_s": round(link / 1e9, 3),
    }


def judge(figures: Mapping[str, float], port_gigabits: float) -> Iterator[Finding]:
    """Yield the findings about measured figures. `port_gigabits`: the rate of the fastest RDMA port; 0 without one."""
    share = figures.get("slowest_of_fastest_device", 1.0)
    if share < DEVICE_SHARE:
        what = f"the slowest GPU of this machine multiplies at {share:.0%} of the fastest"
        yield Finding("problem", what, "all ranks wait for it", "check clocks, power and temperature (nvidia-smi -q)")
    wanted = PORT_SHARE * port_gigabits * 1e9 / 8
    for name in COLLECTIVES:
        measured = figures.get(f"{name}_bytes_per_second", wanted)
        if measured < wanted:
            what = f"{name.replace('_', '-')} runs at {size(measured)}/s, with RDMA ports of {port_gigabits:g} Gbit/s"
            why = "NCCL probably uses TCP, and training waits for the network"
            yield Finding("problem", what, why, "check libibverbs, /dev/infiniband, NCCL_IB_HCA and NCCL_DEBUG=INFO")


def readable(figures: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return names and values with units, for people."""
    names = {
        "devices": "GPUs",
        "matmul_bf16_flops_per_second": "matrix products in bf16, slowest device",
        "slowest_of_fastest_device": "slowest device, of the fastest",
        "copy_bytes_per_second": "memory copy",
        "memory_bytes": "memory of the device",
        "disk_write_bytes_per_second": "disk write",
        "ranks": "ranks",
        "all_reduce_bytes_per_second": "all-reduce",
        "all_gather_bytes_per_second": "all-gather",
        "reduce_scatter_bytes_per_second": "reduce-scatter",
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


def _bandwidths(world: World) -> dict[str, float]:
    """Return the ranks and the bytes per second of each of COLLECTIVES, empty for one rank. Collective.

    A ring sends `(n - 1) / n` of the tensor through each of n ranks, and twice that in an all-reduce."""
    import torch
    import torch.distributed as dist

    from parallel.bootstrap import start
    from parallel.config import ParallelConfig
    from parallel.mpi import meet

    world = meet(world)
    if world.world_size == 1:
        return {}
    runtime = start(ParallelConfig(engine="ddp"), world)
    ranks = world.world_size
    parts = [torch.ones(BYTES // 4 // ranks, device=runtime.device) for _ in range(ranks)]
    values, part = torch.cat(parts), torch.ones_like(parts[0])
    acts: dict[str, tuple[Callable[[], object], Any]] = {
        "all_reduce": (lambda: dist.all_reduce(values), values),  # pyright: ignore
        "all_gather": (lambda: dist.all_gather(parts, part), parts[0]),  # pyright: ignore
        "reduce_scatter": (lambda: dist.reduce_scatter(part, parts), part),  # pyright: ignore
    }
    sent = values.nbytes * (ranks - 1) / ranks
    found = {"ranks": float(ranks)}
    for name, (act, result) in acts.items():  # the first of each connects
        moved = 2 * sent if name == "all_reduce" else sent
        found[f"{name}_bytes_per_second"] = moved / _best_seconds(act, result, 4)
    dist.destroy_process_group()
    return found
