"""Devices, limits and the file system of this machine, for `keepstep doctor`."""

import fcntl
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from launch.doctor import network, versions
from launch.doctor.cards import card_findings
from launch.doctor.finding import Finding
from launch.doctor.gpus import gpu_findings
from launch.supervise.local import count_gpus
from parallel.addresses import own_addresses

GIB = 2**30
SAMPLE = 1 << 24
"""Bytes written to try a file system."""
SLOW_BYTES_PER_SECOND = 50e6


def examine(folder: Path) -> Iterator[Finding]:
    """Yield the findings about this machine alone. `folder` is where runs will be stored."""
    installed = versions.installed()
    yield from versions.version_findings(installed, platform.python_version(), platform.machine())
    yield device_finding(count_gpus(os.environ), installed["driver"])
    yield from gpu_findings()
    yield from card_findings()
    yield from limit_findings(resource.getrlimit(resource.RLIMIT_NOFILE)[0], shutil.disk_usage("/dev/shm").total)
    yield from file_system_findings(folder)
    yield network.name_finding(socket.gethostname(), network.resolve)
    yield network.interface_finding(own_addresses(), network.rdma_devices())
    yield from network.ports_here()
    yield network.clock_finding(network.clock_state())


def device_finding(gpus: int, driver: str) -> Finding:
    """Return whether the GPUs of this machine can be used. `driver` is the version, or ""."""
    if not gpus:
        return Finding("note", "no NVIDIA GPU", "training runs on the CPU", "nothing, to try things out")
    if not driver:
        return Finding(
            "problem", f"{gpus} GPUs but nvidia-smi fails", "torch will not see them", "reinstall the NVIDIA driver"
        )
    return Finding("ok", f"{gpus} GPUs, driver {driver}")


def limit_findings(open_files: int, shm_bytes: int) -> Iterator[Finding]:
    """Yield whether the limits of open files and of shared memory are large enough."""
    files, memory = f"{open_files} open files allowed", f"/dev/shm has {shm_bytes / GIB:.2f} GiB"
    if open_files < 4096:
        yield Finding(
            "problem",
            f"only {files}",
            "every rank keeps sockets to its peers and mapped shards open",
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
    """Yield whether commits by rename, fsync and locks work in the folder of the runs."""
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
        bytes_per_second = write_speed(file, SAMPLE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            why = "the lease, which keeps two runs out of one folder, needs them"
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
    yield network.file_clock_finding(folder)
    yield speed_finding(folder, shutil.disk_usage(folder).free, bytes_per_second)


def speed_finding(folder: Path, free_bytes: int, bytes_per_second: float) -> Finding:
    """Return whether the file system is fast and large enough for checkpoints."""
    what = f"rename and fsync work in {folder.resolve()}, {free_bytes / GIB:.0f} GiB free"
    what += f", {SAMPLE / 1e6:.0f} MB written at {bytes_per_second / 1e6:.0f} MB/s"
    if bytes_per_second < SLOW_BYTES_PER_SECOND:
        why = "a checkpoint of a model with 1B parameters has 12 GB"
        return Finding("note", what, why, "choose another runs_dir, or save less often (checkpoint.every)")
    if free_bytes < 10 * GIB:
        why = "a save needs space for one checkpoint more than are kept"
        return Finding("note", what, why, "free some space, or choose another runs_dir")
    return Finding("ok", what)


def write_speed(file: IO[bytes], size: int) -> float:
    """Write random bytes to the disk and return bytes per second, the fsync included."""
    start = time.perf_counter()
    file.write(os.urandom(size))
    file.flush()
    os.fsync(file.fileno())
    return size / (time.perf_counter() - start)
