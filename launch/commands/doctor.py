"""`keepstep doctor`: what this machine, or every node of an allocation, has that will hurt a run.

Each finding says what, why it matters and what to do. `srun keepstep doctor --cluster` looks at every node and at
Slurm, and lets the nodes call each other; `--measure` adds figures (matrix products, memory, disk, and between ranks
the bandwidth of an all-reduce).
"""

import argparse
import fcntl
import json
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from launch.doctor import network as doctor_network
from launch.doctor import versions as doctor_versions
from launch.doctor.finding import Finding
from launch.doctor.slurm import slurm_findings
from launch.supervise.health import GIB
from launch.supervise.local import count_gpus
from parallel.addresses import own_addresses
from parallel.environ import World, read_world

SIZE = 1 << 26
"""Bytes written to measure a disk, and added up to measure a network."""
SAMPLE = 1 << 24
"""Bytes written to see whether a file system is fit for checkpoints."""
SLOW_BYTES_PER_SECOND = 50e6


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path(), help="where runs will be; its file system is tried")
    parser.add_argument(
        "--cluster", action="store_true", help="also Slurm's settings; with srun, one task on each node"
    )
    parser.add_argument("--measure", action="store_true", help="also speeds, for `keepstep plan`")
    parser.add_argument("--json", action="store_true", help="a JSON object a line: findings, then the figures")


def run(options: argparse.Namespace) -> int:
    """Exit code 1 if there is a problem."""
    findings = list(examine(options.dir))
    world = read_world(os.environ)
    if options.cluster and world.rank == 0:
        findings += slurm_findings()
    if options.cluster and world.world_size > 1:
        findings += doctor_network.meet(world)
    figures = measure(options.dir, world) if options.measure else {}
    host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    if options.json:
        for finding in findings:
            print(json.dumps({"host": host, **asdict(finding)}))
        print(json.dumps({"host": host, "figures": figures}), flush=True)
    else:
        print(as_text(host, findings, figures), flush=True)
    code = 1 if any(finding.level == "problem" for finding in findings) else 0
    if options.measure and world.world_size > 1:
        from parallel.bootstrap import leave_at_once

        leave_at_once(code)  # gloo's threads may abort an ordinary exit
    return code


def as_text(host: str, findings: list[Finding], figures: Mapping[str, float]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{host}: {finding.level:8} {finding.what}")
        lines += [f"{host}:          why: {finding.why}"] if finding.why else []
        lines += [f"{host}:          do:  {finding.do}"] if finding.do else []
    lines += [f"{host}: measured {name} {value:.4g}" for name, value in figures.items()]
    return "\n".join(lines)


def examine(folder: Path) -> Iterator[Finding]:
    """Everything that one machine tells about itself."""
    versions = doctor_versions.installed()
    yield from doctor_versions.version_findings(versions, platform.python_version(), platform.machine())
    yield device_finding(count_gpus(os.environ), versions["driver"])
    yield from limit_findings(resource.getrlimit(resource.RLIMIT_NOFILE)[0], shutil.disk_usage("/dev/shm").total)
    yield from file_system_findings(folder)
    yield doctor_network.name_finding(socket.gethostname(), doctor_network.resolve)
    yield doctor_network.interface_finding(own_addresses(), doctor_network.rdma_devices())
    yield from doctor_network.ports_here()
    yield doctor_network.clock_finding(doctor_network.clock_state())


def device_finding(gpus: int, driver: str) -> Finding:
    if not gpus:
        return Finding("note", "no NVIDIA GPU", "training runs on the CPU", "fine for trying things out")
    if not driver:
        return Finding("problem", f"{gpus} GPUs but nvidia-smi fails", "torch will not see them", "mend the driver")
    return Finding("ok", f"{gpus} GPUs, driver {driver}")


def limit_findings(open_files: int, shm_bytes: int) -> Iterator[Finding]:
    files, memory = f"{open_files} open files allowed", f"/dev/shm has {shm_bytes / GIB:.2f} GiB"
    if open_files < 4096:
        yield Finding(
            "problem",
            f"only {files}",
            "every rank holds sockets to its peers and mapped shards",
            "ulimit -n 65536 (slurm/train.sbatch raises it to the hard limit)",
        )
    else:
        yield Finding("ok", files)
    if shm_bytes < GIB:
        yield Finding(
            "problem",
            memory,
            "NCCL exchanges data between the GPUs of a node there",
            "docker run --shm-size=16g, or a larger tmpfs",
        )
    else:
        yield Finding("ok", memory)


def file_system_findings(folder: Path) -> Iterator[Finding]:
    """Whether commits by rename, fsync and locks work where runs will be."""
    try:
        with tempfile.TemporaryDirectory(prefix=".keepstep-doctor-", dir=folder) as scratch:
            yield from _try_file_system(Path(scratch), folder)
    except OSError as error:
        why = "checkpoints, metrics and the lease are written there"
        yield Finding(
            "problem", f"cannot write in {folder.resolve()}: {error.strerror}", why, "choose another runs_dir"
        )


def _try_file_system(scratch: Path, folder: Path) -> Iterator[Finding]:
    partial, final = scratch / ".partial", scratch / "final"
    partial.mkdir()
    with (partial / "file").open("wb") as file:
        bytes_per_second = _write_speed(file, SAMPLE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            why = "the lease keeps two runs out of one folder"
            yield Finding("problem", f"no file locks in {folder}: {error.strerror}", why, "mount with flock")
    partial.rename(final)
    descriptor = os.open(scratch, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        why = "a power failure may lose a committed checkpoint"
        yield Finding("problem", f"no fsync of folders in {folder}: {error.strerror}", why, "use another file system")
    finally:
        os.close(descriptor)
    yield doctor_network.file_clock_finding(folder)
    yield speed_finding(folder, shutil.disk_usage(folder).free, bytes_per_second)


def speed_finding(folder: Path, free_bytes: int, bytes_per_second: float) -> Finding:
    what = f"rename and fsync work in {folder.resolve()}, {free_bytes / GIB:.0f} GiB free"
    what += f", {SAMPLE / 1e6:.0f} MB written at {bytes_per_second / 1e6:.0f} MB/s"
    if bytes_per_second < SLOW_BYTES_PER_SECOND:
        return Finding(
            "note", what, "a model of 1B parameters has checkpoints of 12 GB", "choose another runs_dir, or save rarely"
        )
    if free_bytes < 10 * GIB:
        return Finding(
            "note", what, "checkpoints need room for one more than are kept", "clear it, or another runs_dir"
        )
    return Finding("ok", what)


def measure(folder: Path, world: World) -> dict[str, float]:
    """Figures of this machine, and among the ranks of a launcher the bandwidth of an all-reduce. Collective."""
    import torch

    from train.model.flops import measure_matmul_peak

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures = {
        "devices": float(torch.cuda.device_count()),
        "matmul_bf16_flops_per_second": measure_matmul_peak(device, torch.bfloat16),
        "copy_bytes_per_second": _copy_bytes_per_second(device),
        "memory_bytes": float(
            torch.cuda.get_device_properties(device).total_memory
            if device.type == "cuda"
            else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        ),
    }
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".keepstep-doctor-") as file:
        figures["disk_write_bytes_per_second"] = _write_speed(file, SIZE)
    return figures | _all_reduce_bandwidth(world)


def _write_speed(file: IO[bytes], size: int) -> float:
    """Bytes per second, to the disk."""
    start = time.perf_counter()
    file.write(os.urandom(size))
    file.flush()
    os.fsync(file.fileno())
    return size / (time.perf_counter() - start)


def _best_seconds(act: Callable[[], object], result: Any, tries: int) -> float:
    """Until the tensor `result` is there."""
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        act()
        result[0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return best


def _copy_bytes_per_second(device: Any) -> float:
    """Of memory, each byte read and written counted once."""
    import torch

    source = torch.ones(SIZE // 4, device=device)
    target = torch.empty_like(source)
    return 2 * SIZE / _best_seconds(lambda: target.copy_(source), target, 5)


def _all_reduce_bandwidth(world: World) -> dict[str, float]:
    """Bytes a rank gets through an all-reduce in a second (the ring's own count, `2 (n - 1) / n` of the tensor)."""
    import torch
    import torch.distributed as dist

    from parallel.bootstrap import start
    from parallel.config import ParallelConfig
    from parallel.mpi import meet

    world = meet(world)
    if world.world_size == 1:
        return {}
    runtime = start(ParallelConfig(engine="ddp"), world)
    values = torch.ones(SIZE // 4, device=runtime.device)
    best = _best_seconds(lambda: dist.all_reduce(values), values, 4)  # the first connects
    dist.destroy_process_group()
    share = 2 * (world.world_size - 1) / world.world_size
    return {"ranks": float(world.world_size), "all_reduce_bytes_per_second": SIZE * share / best}
