"""The health check of each node before the first step of a Slurm job. Called by slurm/train.sbatch.

    python -m launch.supervise.health check --run RUN --nodes N --head HOST:PORT      # as one task on each of N nodes

Each node checks itself: GPUs, memory, disk, matrix products. Then all nodes connect to the head and compare the time of
a matrix product, an all-reduce, and their clocks. Each prints one line, `healthy NODE` or `unhealthy NODE: what`; the
head prints the line of a node that does not answer. The exit code has no meaning, the lines have.

    python -m launch.supervise.health judge LINES NODES      # afterwards: prints which of NODES to exclude

A node without a line is unhealthy too. If it is the head, the others report only that it does not answer.
"""

import argparse
import json
import math
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from launch.doctor.gpus import gpu_findings, output, problems_of
from launch.supervise import network
from launch.supervise.bandwidth import measure_links, slow_network
from launch.supervise.local import count_gpus
from launch.supervise.secret import job_secret, seal, unseal
from parallel.addresses import listen, reached_at
from parallel.environ import expand_nodes

EXCHANGE_SECONDS = 60
"""Longest time that nodes wait for each other's figures."""
CLOCK_SECONDS = 5.0
"""Largest difference between a node's clock and the others'."""
SLOW = 3.0
"""A node is unhealthy if its matrix product takes this many times the others' median."""
GIB = 2**30


def main(argv: Sequence[str]) -> int:
    """Run the check of this node, or print the nodes to exclude."""
    parser = argparse.ArgumentParser(prog="python -m launch.supervise.health")
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check")
    check.add_argument("--run", type=Path, required=True, help="the run folder, whose disk must have free space")
    check.add_argument("--nodes", type=int, required=True, help="nodes that take part")
    check.add_argument("--head", required=True, help="HOST:PORT at which the nodes connect")
    check.add_argument("--min-free-gib", type=float, default=1.0, help="free space in the run folder and in /dev/shm")
    check.add_argument("--min-memory-gib", type=float, default=1.0, help="free host memory")
    judgement = actions.add_parser("judge")
    judgement.add_argument("lines", type=Path, help="file with the lines that the nodes printed")
    judgement.add_argument("nodes", help="as Slurm writes them, such as n[1-3]")
    options = parser.parse_args(argv)
    if options.action == "judge":
        lines = options.lines.read_text(encoding="utf-8", errors="replace").splitlines()
        print(",".join(judge(lines, expand_nodes(options.nodes))))
    else:
        _check(options)
    return 0


def _check(options: argparse.Namespace) -> None:
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    problems = check_node(options.run, options.min_free_gib, options.min_memory_gib)
    figures, more = _own_figures(problems)
    problems += more
    if options.nodes > 1:
        problems += _compare_nodes(options, node, figures)
    report(node, problems)


def report(node: str, problems: Sequence[str]) -> None:
    """Print this node's line, in one write so that the lines of nodes do not mix."""
    text = f"unhealthy {node}: {'; '.join(problems)}" if problems else f"healthy {node}"
    print(text + "\n", end="", flush=True)


def judge(lines: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Return the nodes to exclude: those that are unhealthy, and those without a line while others have one.

    If all of several nodes are unhealthy, none is excluded: the cause is not in the nodes."""
    words = [line.replace(":", " ").split() for line in lines]
    healthy, unhealthy = ({word[1] for word in words if word[:1] == [kind]} for kind in ("healthy", "unhealthy"))
    silent = set(nodes) - healthy - unhealthy if healthy | unhealthy else set[str]()
    found = [node for node in nodes if node in unhealthy | silent]
    return [] if len(found) == len(nodes) > 1 else found


def check_node(run: Path, min_free_gib: float, min_memory_gib: float) -> list[str]:
    """Return the problems that this node can find by itself: GPUs, disk, memory."""
    problems = []
    expected = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if expected.isdecimal() and count_gpus(os.environ) < int(expected):
        problems.append(f"{count_gpus(os.environ)} GPUs visible, {expected} expected")
    if count_gpus(os.environ):
        problems += problems_of(gpu_findings())
        used = output("nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits")
        problems += memory_problems(used or "")
    for folder in (run, Path("/dev/shm")):
        free_gib = shutil.disk_usage(folder).free / GIB
        if free_gib < min_free_gib:
            problems.append(f"{free_gib:.1f} GiB free in {folder}, {min_free_gib} needed")
    memory_gib = psutil.virtual_memory().available / GIB
    if memory_gib < min_memory_gib:
        problems.append(f"{memory_gib:.1f} GiB of memory free, {min_memory_gib} needed")
    return problems


def memory_problems(csv: str) -> list[str]:
    """Return the problems in nvidia-smi's lines of index and MiB in use."""
    problems = []
    for line in csv.splitlines():
        index, used_mib = (word.strip() for word in line.split(","))
        if used_mib.isdecimal() and int(used_mib) > 2048:
            problems.append(f"GPU {index} has {used_mib} MiB in use by another process")
    return problems


def _own_figures(problems: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """Return the seconds of a matrix product on this node's slowest device, and devices whose results are wrong."""
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
            wrong.append(f"{device} multiplies wrongly ({totals} instead of {size * size})")
        if not bool((product.to(neighbour) == size).all()):
            wrong.append(f"a copy from {device} to {neighbour} differs from its source")
        worst = max(worst, min(times))
    return {"matmul_seconds": worst}, wrong


def _compare_nodes(options: argparse.Namespace, node: str, figures: Mapping[str, float]) -> list[str]:
    """Exchange figures with the other nodes and run an all-reduce; the head prints a line for each missing node.

    Returns the problems of this node. Collective."""
    import torch.distributed as dist

    rank = int(os.environ.get("SLURM_PROCID", "0"))
    host, port = network.parse_endpoint(options.head)
    address, interface = reached_at(host, port, rank == 0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    limit, secret = timedelta(seconds=EXCHANGE_SECONDS), job_secret(os.environ)
    try:
        server = listen(address, port).detach() if rank == 0 else None  # torch alone listens on all interfaces
        host = address if rank == 0 else host
        store = dist.TCPStore(host, port, None, rank == 0, limit, wait_for_workers=False, master_listen_fd=server)
        sealed = seal(secret, _purpose(rank), json.dumps({"node": node, **figures}).encode())
        store.set(f"node{rank}", sealed.decode())
        everyone = _gather(store, options.nodes, secret)
    except (dist.DistError, OSError) as error:
        print(f"{node}: the head at {options.head} does not answer: {str(error).splitlines()[0]}", flush=True)
        return []  # the head's fault: it has no line, so `judge` excludes it
    if rank == 0:
        for name in missing(everyone, os.environ):
            report(name, [f"did not answer within {EXCHANGE_SECONDS} s"])
    if len(everyone) < options.nodes:
        return []  # not this node's fault
    found = compare(node, figures, list(everyone.values()))
    return found + _all_reduce(store, rank, options.nodes, limit)


def _gather(store: Any, nodes: int, secret: bytes) -> dict[int, dict[str, Any]]:
    """Return the figures that arrive within EXCHANGE_SECONDS, by rank."""
    deadline, found = time.monotonic() + EXCHANGE_SECONDS, {}
    while len(found) < nodes:
        missing = sorted(set(range(nodes)) - set(found))
        is_last = time.monotonic() > deadline
        if not is_last and not store.check([f"node{rank}" for rank in missing]):  # one question for all
            time.sleep(max(0.05, nodes / 1000))  # the head answers all nodes
            continue
        for rank in missing:
            if store.check([f"node{rank}"]):
                sent = read_figures(unseal(secret, _purpose(rank), store.get(f"node{rank}")))
                if sent is not None:
                    found[rank] = sent
        if is_last:
            break
        time.sleep(0.05)
    return found


def _purpose(rank: int) -> str:
    return f"health of node {rank}"


def read_figures(text: bytes | None) -> dict[str, Any] | None:
    """Return the figures that a node sent, or None if the text is none of this job or has not their form."""
    try:
        figures: Any = json.loads(text or b"")
        seconds = figures["matmul_seconds"]
        right = isinstance(figures["node"], str) and isinstance(seconds, float) and 0 <= seconds < math.inf
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return figures if right else None


def missing(everyone: Mapping[int, Mapping[str, Any]], env: Mapping[str, str]) -> list[str]:
    """Return the nodes of this Slurm step that sent no figures."""
    names = expand_nodes(env.get("SLURM_STEP_NODELIST", ""))
    return sorted(set(names) - {str(figures["node"]) for figures in everyone.values()})


def compare(node: str, own: Mapping[str, float], everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how this node's figures differ from the others' median."""
    others = [figures for figures in everyone if figures["node"] != node]
    problems = []
    usual = statistics.median(figures["matmul_seconds"] for figures in others)
    if len(others) > 1 and usual > 0 and own["matmul_seconds"] > SLOW * usual:
        problems.append(f"a matrix product takes {own['matmul_seconds']:.4f} s, {usual:.4f} s on the other nodes")
    return problems


def clock_problems(rank: int, clocks: Sequence[float]) -> list[str]:
    """Return whether this node's clock is wrong. `clocks` holds what all nodes read at the same moment, by rank.

    Of two clocks that differ, the head's counts as right."""
    usual = statistics.median(clocks) if len(clocks) > 2 else clocks[0]
    difference = clocks[rank] - usual
    return [f"its clock is {difference:+.0f} s from the others'"] if abs(difference) > CLOCK_SECONDS else []


def _all_reduce(store: Any, rank: int, nodes: int, limit: timedelta) -> list[str]:
    """Check an all-reduce over the network, and over NCCL where there are GPUs; then compare clocks. Collective."""
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # otherwise a time-out kills the process before it prints
    wrong = []
    try:
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=nodes, timeout=limit)
        for device in ("cpu", "cuda") if gpu else ("cpu",):
            total = torch.full((1 << 20,), float(rank + 1), device=device)
            dist.all_reduce(total)
            expected = nodes * (nodes + 1) / 2
            if not bool((total == expected).all()):
                wrong.append(f"all-reduce on {device} gives {total[0].item()} instead of {expected}")
        if gpu:
            wrong += slow_network(rank, nodes, measure_links(rank, nodes, "cuda"))
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
    os._exit(code)  # torch's own exit would wait for a peer that failed
