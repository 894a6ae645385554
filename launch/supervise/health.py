"""Is this node fit to train? Run on every node of a job before the first step; slurm/train.sbatch reads the answer.

    python -m launch.supervise.health check --run RUN --nodes N --head HOST:PORT      # as one task on each of N nodes

Each node looks at itself (GPUs, memory, disk, matrix products), then all meet at the head and compare: the time of a
matrix product, an all-reduce, clocks. Prints one line for each node, `healthy NODE` or `unhealthy NODE: what`; a node
that does not appear is named by the head. The exit code says nothing: the lines do.

    python -m launch.supervise.health judge LINES NODES      # afterwards: those of NODES to leave out

A node without a line is unfit too: if that is the head, the others only say that they miss it.
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

from launch.supervise import network
from launch.supervise.local import count_gpus
from parallel.addresses import reached_at
from parallel.environ import expand_nodes

MEET_SECONDS = 60
CLOCK_SECONDS = 5.0
SLOW = 3.0
"""A node is unfit whose matrix product takes this many times the others' median."""
GIB = 2**30


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.supervise.health")
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check")
    check.add_argument("--run", type=Path, required=True, help="the run folder, whose disk must have room")
    check.add_argument("--nodes", type=int, required=True)
    check.add_argument("--head", required=True, help="HOST:PORT where the nodes meet")
    check.add_argument("--min-free-gib", type=float, default=1.0, help="free space in the run folder and in /dev/shm")
    check.add_argument("--min-memory-gib", type=float, default=1.0, help="free host memory")
    verdict = actions.add_parser("judge")
    verdict.add_argument("lines", type=Path, help="what the nodes said")
    verdict.add_argument("nodes", help="as Slurm writes them, such as n[1-3]")
    options = parser.parse_args(argv)
    if options.action == "judge":
        print(",".join(judge(options.lines.read_text(encoding="utf-8").splitlines(), expand_nodes(options.nodes))))
    else:
        _check(options)
    return 0


def _check(options: argparse.Namespace) -> None:
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    problems = check_node(options.run, options.min_free_gib, options.min_memory_gib)
    figures, more = _own_figures(problems)
    problems += more
    if options.nodes > 1:
        problems += _meet(options, node, figures)
    report(node, problems)


def report(node: str, problems: Sequence[str]) -> None:
    """One write, so that the lines of nodes don't mix."""
    text = f"unhealthy {node}: {'; '.join(problems)}" if problems else f"healthy {node}"
    print(text + "\n", end="", flush=True)


def judge(lines: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Nodes that are unfit, or said nothing while others spoke. If all of several are, other nodes would be too."""
    words = [line.replace(":", " ").split() for line in lines]
    fit, unfit = ({word[1] for word in words if word[:1] == [kind]} for kind in ("healthy", "unhealthy"))
    silent = set(nodes) - fit - unfit if fit | unfit else set[str]()
    found = [node for node in nodes if node in unfit | silent]
    return [] if len(found) == len(nodes) > 1 else found


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
    """The seconds of a matrix product on this node's slowest device; and whether products and copies are right."""
    import torch

    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]
    worst, wrong = 0.0, []
    for device, neighbour in zip(devices, devices[1:] + devices[:1], strict=True) if not problems else []:
        size = 4096 if device.type == "cuda" else 512
        ones = torch.ones(size, size, device=device)
        product, times, totals = ones, [], set()
        for _ in range(3):
            start = time.perf_counter()
            product = ones @ ones
            totals.add(product[0].sum().item())
            times.append(time.perf_counter() - start)
        if totals != {size * size}:
            wrong.append(f"{device} multiplies wrongly ({totals} for {size * size})")
        if not bool((product.to(neighbour) == size).all()):
            wrong.append(f"a copy from {device} to {neighbour} is not what was sent")
        worst = max(worst, min(times))
    return {"matmul_seconds": worst}, wrong


def _meet(options: argparse.Namespace, node: str, figures: Mapping[str, float]) -> list[str]:
    """Exchange figures with the others and add numbers up. The head prints the nodes that it misses."""
    import torch.distributed as dist

    rank = int(os.environ.get("SLURM_PROCID", "0"))
    host, port = network.parse_endpoint(options.head)
    _, interface = reached_at(host, port, rank == 0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    limit = timedelta(seconds=MEET_SECONDS)
    try:
        store = dist.TCPStore(host, port, is_master=rank == 0, timeout=limit, wait_for_workers=False)
        store.set(f"node{rank}", json.dumps({"node": node, "problem": "", **figures}))
        everyone = _gather(store, options.nodes)
    except dist.DistError as error:
        print(f"{node}: the head at {options.head} does not answer: {str(error).splitlines()[0]}", flush=True)
        return []  # the head's fault, which says nothing
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
    return problems


def clock_problems(rank: int, clocks: Sequence[float]) -> list[str]:
    """`clocks`: what all nodes read at the same moment. Of two that differ, the head is believed."""
    usual = statistics.median(clocks) if len(clocks) > 2 else clocks[0]
    apart = clocks[rank] - usual
    return [f"its clock is {apart:+.0f} s from the others'"] if abs(apart) > CLOCK_SECONDS else []


def _all_reduce(store: Any, rank: int, nodes: int, limit: timedelta) -> list[str]:
    """Add up over the network, on GPUs over the fast one too; then all read their clocks. Collective."""
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else a time-out kills the process before it can speak
    wrong = []
    try:
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=nodes, timeout=limit)
        for device in ("cpu", "cuda") if gpu else ("cpu",):
            total = torch.full((1 << 20,), float(rank + 1), device=device)
            dist.all_reduce(total)
            expected = nodes * (nodes + 1) / 2
            if not bool((total == expected).all()):
                wrong.append(f"all-reduce on {device} gives {total[0].item()} for {expected}")
        dist.barrier(device_ids=[0] if gpu else None)
        clocks = torch.zeros(nodes, dtype=torch.float64)
        clocks[rank] = time.time()
        dist.all_reduce(clocks)
    except RuntimeError as error:
        return [f"all-reduce with the other nodes failed: {str(error).splitlines()[0]}"]
    return wrong + clock_problems(rank, clocks.tolist())


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # not through torch's exit: a peer that failed must not hold us
