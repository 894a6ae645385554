"""Is this node fit to train? Run on every node of a job before the first step; slurm/train.sbatch reads the answer.

    python -m launch.health --run RUN --nodes N --head HOST:PORT      # as one task on each of N nodes

Each node looks at itself (GPUs, memory, disk), then all meet at the head and compare: clocks, the time of a matrix
product, an all-reduce. Prints one line for each node, `healthy NODE` or `unhealthy NODE: what`; a node that does not
appear, or is far slower than the others, is named by the head. The exit code says nothing: the lines do.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from launch import network
from launch.local import count_gpus
from parallel.environ import expand_nodes

MEET_SECONDS = 60
CLOCK_SECONDS = 5.0
SLOW = 3.0
"""A node is unfit whose matrix product takes this many times the others' median."""
GIB = 2**30


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.health")
    parser.add_argument("--run", type=Path, required=True, help="the run folder, whose disk must have room")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--head", required=True, help="HOST:PORT where the nodes meet")
    parser.add_argument("--min-free-gib", type=float, default=1.0, help="free space in the run folder and in /dev/shm")
    parser.add_argument("--min-memory-gib", type=float, default=1.0, help="free host memory")
    options = parser.parse_args(argv)
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    problems = check_node(options.run, options.min_free_gib, options.min_memory_gib)
    figures, more = _own_figures(problems)
    problems += more
    if options.nodes > 1:
        problems += _meet(options, node, figures)
    report(node, problems)
    sys.stdout.flush()
    os._exit(0)  # not through torch's exit: a peer that failed must not hold us


def report(node: str, problems: Sequence[str]) -> None:
    """One write, so that the lines of nodes don't mix."""
    text = f"unhealthy {node}: {'; '.join(problems)}" if problems else f"healthy {node}"
    print(text + "\n", end="", flush=True)


def check_node(run: Path, min_free_gib: float, min_memory_gib: float) -> list[str]:
    """What is wrong with this node, by itself."""
    problems = []
    expected = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if expected.isdecimal() and count_gpus(os.environ) < int(expected):
        problems.append(f"{count_gpus(os.environ)} GPUs visible, {expected} expected")
    if count_gpus(os.environ) and shutil.which("nvidia-smi"):
        query = "--query-gpu=index,ecc.errors.uncorrected.volatile.total,memory.used"
        smi = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True)
        problems += gpu_problems(smi.stdout) if smi.returncode == 0 else [f"nvidia-smi: {smi.stdout.strip()[:200]}"]
    for place in (run, Path("/dev/shm")):
        free_gib = shutil.disk_usage(place).free / GIB
        if free_gib < min_free_gib:
            problems.append(f"{free_gib:.1f} GiB free in {place}, {min_free_gib} needed")
    memory_gib = psutil.virtual_memory().available / GIB
    if memory_gib < min_memory_gib:
        problems.append(f"{memory_gib:.1f} GiB of memory free, {min_memory_gib} needed")
    return problems


def gpu_problems(csv: str) -> list[str]:
    """From nvidia-smi's lines of index, uncorrected ECC errors and MiB in use."""
    problems = []
    for line in csv.splitlines():
        index, errors, used_mib = (word.strip() for word in line.split(","))
        if errors.isdecimal() and int(errors) > 0:
            problems.append(f"GPU {index} has {errors} uncorrected ECC errors")
        if used_mib.isdecimal() and int(used_mib) > 2048:
            problems.append(f"GPU {index} has {used_mib} MiB in use by another process")
    return problems


def _own_figures(problems: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """This node's clock and the seconds of a matrix product on its slowest device; and whether the product is right."""
    import torch

    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]
    worst, wrong = 0.0, []
    for device in devices if not problems else []:
        size = 4096 if device.type == "cuda" else 512
        ones = torch.ones(size, size, device=device)
        times, totals = [], set()
        for _ in range(3):
            start = time.perf_counter()
            totals.add((ones @ ones)[0].sum().item())
            times.append(time.perf_counter() - start)
        if totals != {size * size}:
            wrong.append(f"{device} multiplies wrongly ({totals} for {size * size})")
        worst = max(worst, min(times))
    return {"matmul_seconds": worst, "clock": time.time()}, wrong


def _meet(options: argparse.Namespace, node: str, figures: Mapping[str, float]) -> list[str]:
    """Exchange figures with the others and add numbers up. The head prints the nodes that it misses."""
    import torch.distributed as dist

    rank = int(os.environ.get("SLURM_PROCID", "0"))
    host, port = network.parse_endpoint(options.head)
    address = network.head_here(host) if rank == 0 else network.address_towards(host, port)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", network.own_addresses()[address])
    limit = timedelta(seconds=MEET_SECONDS)
    try:
        store = dist.TCPStore(host, port, is_master=rank == 0, timeout=limit, wait_for_workers=False)
        figures = {**figures, "clock": time.time()}
        store.set(f"node{rank}", json.dumps({"node": node, "problem": "", **figures}))
        everyone = _gather(store, options.nodes)
    except dist.DistError as error:
        return [f"cannot reach the head at {options.head}: {str(error).splitlines()[0]}"]
    if rank == 0:
        for name in missing(everyone, os.environ):
            report(name, [f"did not answer within {MEET_SECONDS} s"])
    if len(everyone) < options.nodes:
        return []  # not this node's fault
    found = compare(node, figures, list(everyone.values()))
    return found + _all_reduce(store, rank, options.nodes, limit)


def _gather(store: Any, nodes: int) -> dict[int, dict[str, Any]]:
    """Every node's figures, as far as they come in time."""
    deadline, found = time.monotonic() + MEET_SECONDS, {}
    while len(found) < nodes and time.monotonic() < deadline:
        for rank in set(range(nodes)) - set(found):
            if store.check([f"node{rank}"]):
                found[rank] = json.loads(store.get(f"node{rank}"))
        time.sleep(0.05)
    return found


def missing(everyone: Mapping[int, Mapping[str, Any]], env: Mapping[str, str]) -> list[str]:
    names = expand_nodes(env.get("SLURM_STEP_NODELIST", ""))
    return sorted(set(names) - {str(figures["node"]) for figures in everyone.values()})


def compare(node: str, mine: Mapping[str, float], everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """What sets this node apart from the others."""
    others = [figures for figures in everyone if figures["node"] != node]
    problems = []
    usual = statistics.median(figures["matmul_seconds"] for figures in others)
    if len(others) > 1 and usual > 0 and mine["matmul_seconds"] > SLOW * usual:
        problems.append(f"a matrix product takes {mine['matmul_seconds']:.4f} s, {usual:.4f} s on the other nodes")
    clock = statistics.median(figures["clock"] for figures in everyone)
    if abs(mine["clock"] - clock) > MEET_SECONDS + CLOCK_SECONDS:
        problems.append(f"its clock is {mine['clock'] - clock:+.0f} s from the others'")
    return problems


def _all_reduce(store: Any, rank: int, nodes: int, limit: timedelta) -> list[str]:
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=nodes, timeout=limit)
        total = torch.full((1 << 20,), float(rank + 1))
        dist.all_reduce(total)
        dist.barrier()
    except RuntimeError as error:
        return [f"all-reduce with the other nodes failed: {str(error).splitlines()[0]}"]
    expected = nodes * (nodes + 1) / 2
    return [] if bool((total == expected).all()) else [f"all-reduce gives {total[0].item()} for {expected}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
