"""`keepstep doctor`: what this machine, or every node of an allocation, has that will hurt a run.

Each finding says what, why it matters and what to do. `srun keepstep doctor --cluster` looks at every node and at
Slurm; `--measure` adds figures (matrix products, disk, and between ranks the bandwidth of an all-reduce).
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from launch.health import GIB
from launch.local import count_gpus

PACKAGES = ("torch", "deepspeed", "transformers", "safetensors", "mpi4py")
SIZE = 1 << 26
"""Bytes written to measure a disk, and added up to measure a network."""


@dataclass(frozen=True)
class Finding:
    level: Literal["ok", "note", "problem"]
    what: str
    why: str = ""
    do: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path(), help="where runs will be; its file system is tried")
    parser.add_argument(
        "--cluster", action="store_true", help="also Slurm's settings; with srun, one task on each node"
    )
    parser.add_argument("--measure", action="store_true", help="also speeds, for `keepstep plan`")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(options: argparse.Namespace) -> int:
    """Exit code 1 if there is a problem."""
    findings = list(examine(options.dir))
    if options.cluster and os.environ.get("SLURM_PROCID", "0") == "0":
        findings += slurm_findings()
    figures = measure(options.dir) if options.measure else {}
    host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    if options.json:
        print(json.dumps({"host": host, "findings": [asdict(f) for f in findings], "figures": figures}))
    else:
        print(as_text(host, findings, figures), flush=True)
    return 1 if any(finding.level == "problem" for finding in findings) else 0


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
    yield from version_findings({name: _version(name) for name in PACKAGES}, platform.python_version())
    yield device_finding(count_gpus(os.environ), _driver())
    yield from limit_findings(resource.getrlimit(resource.RLIMIT_NOFILE)[0], shutil.disk_usage("/dev/shm").total)
    yield from file_system_findings(folder)
    yield name_finding(socket.gethostname(), _resolve)


def version_findings(versions: Mapping[str, str], python: str) -> Iterator[Finding]:
    """Versions, and those that are known to fail together."""
    yield Finding("ok", f"Python {python}, " + ", ".join(f"{n} {v or 'absent'}" for n, v in versions.items()))
    torch = _numbers(versions.get("torch", ""))
    if not torch:
        yield Finding("problem", "torch is not installed", "nothing trains without it", "pip install 'torch>=2.11'")
    elif torch < (2, 11):
        yield Finding(
            "problem", f"torch {versions['torch']}", "FSDP2 and DCP lack what is used here", "upgrade to 2.11"
        )
    if versions.get("deepspeed") and _numbers(versions["deepspeed"]) < (0, 19, 8):
        yield Finding(
            "problem",
            f"deepspeed {versions['deepspeed']}",
            "the engines zero1 to zero3 read its inner state, which differs before 0.19.8",
            "pip install deepspeed==0.19.8",
        )
    if not versions.get("mpi4py"):
        yield Finding("note", "mpi4py is absent", "`mpirun python -m train` needs it", "use torchrun, or install it")


def device_finding(gpus: int, driver: str) -> Finding:
    if not gpus:
        return Finding("note", "no NVIDIA GPU", "training runs on the CPU", "fine for trying things out")
    if not driver:
        return Finding("problem", f"{gpus} GPUs but nvidia-smi fails", "torch will not see them", "mend the driver")
    return Finding("ok", f"{gpus} GPUs, driver {driver}")


def limit_findings(open_files: int, shm_bytes: int) -> Iterator[Finding]:
    if open_files < 4096:
        yield Finding(
            "problem",
            f"only {open_files} open files allowed",
            "every rank holds sockets to its peers and mapped shards",
            "ulimit -n 65536 (slurm/train.sbatch raises it to the hard limit)",
        )
    if shm_bytes < GIB:
        yield Finding(
            "problem",
            f"/dev/shm has {shm_bytes / GIB:.2f} GiB",
            "NCCL exchanges data between the GPUs of a node there",
            "docker run --shm-size=16g, or a larger tmpfs",
        )


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
    import fcntl

    partial, final = scratch / ".partial", scratch / "final"
    partial.mkdir()
    with (partial / "file").open("wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
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
    free_gib = shutil.disk_usage(folder).free / GIB
    level = "ok" if free_gib > 10 else "note"
    yield Finding(level, f"rename and fsync work in {folder.resolve()}, {free_gib:.0f} GiB free")


def name_finding(host: str, resolve: Callable[[str], str | None]) -> Finding:
    address = resolve(host)
    if address is None or address.startswith("127."):
        return Finding(
            "note",
            f"the name {host} stands for {address or 'nothing'} here",
            "programs that listen on their own name are not reached by other nodes",
            "keepstep uses addresses; for torchrun by hand give --local-addr and GLOO_SOCKET_IFNAME",
        )
    return Finding("ok", f"the name {host} stands for {address}")


def slurm_findings() -> list[Finding]:
    """Slurm's settings that decide whether a run survives."""
    try:
        result = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return [Finding("problem", "scontrol does not answer", "no job can be submitted from here", "use a login node")]
    pairs = (line.partition("=") for line in result.stdout.splitlines())
    return list(judge_slurm({name.strip(): value.strip() for name, _, value in pairs}))


def judge_slurm(config: Mapping[str, str]) -> Iterator[Finding]:
    """From the names and values of `scontrol show config`."""
    yield Finding("ok", f"Slurm {config.get('SLURM_VERSION', '?')}, cluster {config.get('ClusterName', '?')}")
    if config.get("JobRequeue") == "0":
        yield Finding(
            "note", "JobRequeue is 0", "jobs are not requeued unless they ask", "train.sbatch asks: --requeue"
        )
    seconds = _numbers(config.get("KillWait", "30"))[:1]
    if seconds and seconds[0] < 30:
        yield Finding(
            "problem",
            f"KillWait is {seconds[0]} s",
            "a cancelled or preempted job has so long to save",
            "raise it, or save more often (checkpoint.every)",
        )
    preempts = config.get("PreemptMode", "OFF") not in ("OFF", "(null)")
    if preempts and "preempt_send_user_signal" not in config.get("SlurmctldParameters", ""):
        yield Finding(
            "note",
            "preemption comes without the warning signal",
            "a preempted job gets TERM only, and KILL after KillWait or the partition's grace time",
            "SlurmctldParameters=preempt_send_user_signal, and GraceTime in the partition",
        )
    if "linuxproc" in config.get("ProctrackType", "") or "pgid" in config.get("ProctrackType", ""):
        yield Finding(
            "note",
            f"ProctrackType is {config['ProctrackType']}",
            "processes that leave their group outlive a job",
            "proctrack/cgroup; keepstep ends its own left-over processes either way",
        )


def measure(folder: Path) -> dict[str, float]:
    """Figures of this machine, and among the ranks of a launcher the bandwidth of an all-reduce. Collective."""
    import torch

    from train.flops import measure_matmul_peak

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures = {"matmul_bf16_flops_per_second": measure_matmul_peak(device, torch.bfloat16)}
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".keepstep-doctor-") as file:
        start = time.perf_counter()
        file.write(b"\0" * SIZE)
        file.flush()
        os.fsync(file.fileno())
        figures["disk_write_bytes_per_second"] = SIZE / (time.perf_counter() - start)
    return figures | _all_reduce_bandwidth()


def _all_reduce_bandwidth() -> dict[str, float]:
    """Bytes a rank gets through an all-reduce in a second (the ring's own count, `2 (n - 1) / n` of the tensor)."""
    import torch
    import torch.distributed as dist

    from parallel.bootstrap import start
    from parallel.config import ParallelConfig
    from parallel.environ import read_world
    from parallel.mpi import meet

    world = meet(read_world(os.environ))
    if world.world_size == 1:
        return {}
    runtime = start(ParallelConfig(engine="ddp"), world)
    values = torch.ones(SIZE // 4, device=runtime.device)
    dist.all_reduce(values)
    begin = time.perf_counter()
    dist.all_reduce(values)
    seconds = time.perf_counter() - begin + values[0].item() * 0
    dist.destroy_process_group()
    share = 2 * (world.world_size - 1) / world.world_size
    return {"ranks": float(world.world_size), "all_reduce_bytes_per_second": SIZE * share / seconds}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    words = version.partition("+")[0].replace(" ", ".").split(".")
    return tuple(int(word) for word in words if word.isdecimal())


def _driver() -> str:
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, check=False)
    return result.stdout.splitlines()[0] if result.returncode == 0 and result.stdout else ""


def _resolve(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except socket.gaierror:
        return None
