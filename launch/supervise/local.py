"""`keepstep run`: train a recipe on this machine, or as one of several nodes.

    keepstep run recipes/laptop.yaml                          # all GPUs here, or one CPU rank
    keepstep run recipes/laptop.yaml --ranks 2 train.steps=50
    keepstep run RECIPE --nodes 2 --node-rank 0 --head 10.0.0.7:29400   # and the same with --node-rank 1 on the other

Ranks are started by torchrun; what each argument of it is for stands in `torchrun_arguments`. The exit code is that of
the training process (`train/exit_codes.py`), and a run that stopped or failed for good is not started again.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.supervise import network
from launch.supervise.peers import Peers
from launch.supervise.rank_logs import REDIRECT
from launch.supervise.supervisor import kill, left_over, supervise
from parallel.addresses import address_of, reached_at
from parallel.errors import LaunchError
from train.config import Recipe
from train.config_file import load_recipe
from train.health.stop import abort_on_signals
from train.run_folder import MAY_DIFFER, RunFolder

MEET_SECONDS = 300
"""How long nodes wait for each other."""


@dataclass(frozen=True)
class Node:
    """This machine among the nodes of a run."""

    ranks: int
    nodes: int = 1
    node_rank: int = 0
    head: str = "127.0.0.1"
    port: int = 0
    address: str = "127.0.0.1"
    interface: str = "lo"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="the recipe's YAML file")
    parser.add_argument("overrides", nargs="*", help="settings that replace the recipe's, such as train.steps=200")
    parser.add_argument("--ranks", type=int, help="processes on this machine (default: its GPUs, or 1)")
    parser.add_argument("--nodes", type=int, default=1, help="machines that take part")
    parser.add_argument("--node-rank", type=int, help="which of them this is, from 0")
    parser.add_argument("--head", help="HOST:PORT of node 0, free and reachable from all nodes")
    parser.add_argument("--allow", action="append", default=[], choices=MAY_DIFFER, help="may differ on a resume")
    parser.add_argument("--max-restarts", type=int, default=3, help="times that failed ranks are started again")
    parser.add_argument("--stop-seconds", type=float, default=600, help="longest time from a stop signal to the end")
    parser.add_argument("--fake-world", type=int, metavar="N", help="run one rank of N alone, without the others")
    parser.add_argument("--fake-rank", type=int, default=0, metavar="R", help="which rank of the fake world")


def run(options: argparse.Namespace) -> int:
    with abort_on_signals("the start"):  # until the supervisor's own handlers stand
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    recipe = load_recipe(options.recipe, options.overrides)
    if options.fake_world is not None:
        from launch.fake_world import run_fake_world

        return run_fake_world(options.recipe, options.overrides, options.fake_world, options.fake_rank)
    ranks = choose_ranks(options.ranks, count_gpus(os.environ), recipe.parallel.device)
    node = _this_node(ranks, options.nodes, options.node_rank, options.head)
    command = [sys.executable, "-u", "-P", "-m", "train", options.recipe, *options.overrides]
    command += [f"--allow={name}" for name in options.allow]
    return start(command, recipe, node, options.max_restarts, options.stop_seconds)


def start(command: Sequence[str], recipe: Recipe, node: Node, max_restarts: int, stop_seconds: float) -> int:
    """Run `command` as every rank of this node, and answer with the exit code that the ranks agree on."""
    folder = RunFolder.of(recipe)
    run = str(folder.root.resolve())
    orphans = left_over(run, os.environ)
    if orphans:
        print(f"keepstep: ending {len(orphans)} left-over processes of this run: {[p.pid for p in orphans]}")
        kill(orphans)
    if node.nodes > 1 and node.node_rank > 0:
        network.wait_for_head(node.head, node.port, MEET_SECONDS)
    elif node.nodes > 1:
        network.check_free(node.port)
    name = run_id(node, os.environ)
    arguments = torchrun_arguments(node, folder.logs / socket.gethostname(), name, max_restarts)
    argv = [sys.executable, "-P", "-m", "launch.supervise.agent", *arguments, *command]
    env = os.environ | {"KEEPSTEP_RUN": run} | environment(node, os.environ)
    peers = Peers(node.node_rank, address_of(node.head), node.port, name) if node.nodes > 1 else None
    return supervise(argv, env, stop_seconds, peers)


def torchrun_arguments(node: Node, logs: Path, run: str, max_restarts: int) -> list[str]:
    host = "true" if node.node_rank == 0 else "false"
    return [
        f"--nnodes={node.nodes}",
        f"--nproc-per-node={node.ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={network.endpoint(node.head, node.port)}",  # port 0: torchrun picks a free one
        f"--rdzv-id={run}",
        f"--rdzv-conf=is_host={host},join_timeout={MEET_SECONDS}",  # torchrun's own guess compares host names
        f"--local-addr={node.address}",  # else it tells the others this machine's name
        f"--max-restarts={max_restarts}",
        "--shutdown-timeout=8",  # of ranks whose peer failed: stopped ones don't hear a SIGTERM
        "--signals-to-handle=SIGQUIT",  # the supervisor and the ranks see to the others
        f"--log-dir={logs}",
        "--no-python",
        *("sh", "-c", REDIRECT, "sh"),  # each rank to its file
    ]


def environment(node: Node, env: Mapping[str, str]) -> dict[str, str]:
    """What the ranks need and the user hasn't set."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // node.ranks)),
        "GLOO_SOCKET_IFNAME": node.interface,  # else gloo binds to what the host name resolves to
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a shared store keeps stale addresses over a restart
    }
    if node.nodes > 1:
        defaults["NCCL_SOCKET_IFNAME"] = node.interface
    return {name: value for name, value in defaults.items() if name not in env}


def run_id(node: Node, env: Mapping[str, str]) -> str:
    """The same on all nodes of an attempt, and another for each attempt as far as can be known."""
    if "SLURM_JOB_ID" in env:
        return f"job{env['SLURM_JOB_ID']}.{env.get('SLURM_RESTART_COUNT', '0')}"
    if node.nodes > 1:
        return f"at-{node.port}"
    return f"{socket.gethostname()}-{os.getpid()}-{time.time():.0f}"


def choose_ranks(wanted: int | None, gpus: int, device: str) -> int:
    on_gpus = gpus > 0 and device in ("auto", "cuda")
    if wanted is None:
        return gpus if on_gpus else 1
    if wanted < 1:
        raise LaunchError(f"--ranks ({wanted}) must be at least 1")
    if on_gpus and wanted > gpus:
        raise LaunchError(
            f"--ranks ({wanted}) is more than this machine's GPUs ({gpus}); use --ranks {gpus}, or parallel.device=cpu"
        )
    return wanted


def count_gpus(env: Mapping[str, str]) -> int:
    """NVIDIA GPUs that this process may use, without asking torch."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _slurm_node(env: Mapping[str, str]) -> int | None:
    """`srun keepstep run` with one task on each node."""
    return int(env["SLURM_NODEID"]) if "SLURM_STEP_ID" in env else None


def _this_node(ranks: int, nodes: int, node_rank: int | None, head: str | None) -> Node:
    if nodes < 1:
        raise LaunchError(f"--nodes ({nodes}) must be at least 1")
    if nodes == 1 and head is None:
        if node_rank:
            raise LaunchError(f"--node-rank ({node_rank}) is for several nodes; add --nodes N and --head HOST:PORT")
        return Node(ranks)
    if node_rank is None:
        node_rank = 0 if nodes == 1 else _slurm_node(os.environ)
    if node_rank is None or head is None:
        raise LaunchError(f"--nodes {nodes} needs --node-rank (0 to {nodes - 1}) and --head HOST:PORT on every node")
    if not 0 <= node_rank < nodes:
        raise LaunchError(f"--node-rank ({node_rank}) must be from 0 to --nodes - 1 ({nodes - 1})")
    host, port = network.parse_endpoint(head)
    address, interface = reached_at(host, port, node_rank == 0)
    return Node(ranks, nodes, node_rank, address if node_rank == 0 else host, port, address, interface)
