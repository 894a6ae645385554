"""Starts the ranks of one node: what `keepstep run` does on a laptop, and on every node of a Slurm or Kubernetes job.

torchrun starts the ranks; `torchrun_arguments` explains each of its arguments. The exit code is that of the training
processes (`train/exit_codes.py`). A run that was stopped or failed for good is not restarted.
"""

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from launch.diagnose.after_failure import diagnose_failure
from launch.diagnose.words import in_one_line
from launch.supervise import network
from launch.supervise.peers import Peers
from launch.supervise.rank_logs import REDIRECT
from launch.supervise.secret import VARIABLE, job_secret
from launch.supervise.supervisor import kill, leftover_processes, supervise
from launch.terminal import visible
from parallel.addresses import address_of, reached_at
from parallel.errors import LaunchError
from train.config import Recipe
from train.exit_codes import FAILED
from train.health.safe_output import protect_output
from train.records.events import EventLog
from train.run_folder import RunFolder


@dataclass(frozen=True)
class Node:
    """One machine of a run, and how the others reach it."""

    ranks: int
    """Training processes on this node."""
    nodes: int = 1
    """Machines in the run."""
    node_rank: int = 0
    head: str = "127.0.0.1"
    """Host name or address of node 0, where the nodes rendezvous."""
    port: int = 0
    """Port of the rendezvous on node 0; 0: torchrun picks a free one."""
    address: str = "127.0.0.1"
    """Address at which other nodes reach this one."""
    interface: str = "lo"
    """Network interface of `address`."""


def start(
    command: Sequence[str],
    recipe: Recipe,
    node: Node,
    max_restarts: int,
    stop_seconds: float,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run `command` as every rank of this node and return the exit code on which the ranks agree.

    `variables`: further environment variables of the ranks.
    Raises LaunchError if node 0 cannot be reached or its port is taken."""
    protect_output()
    secret = shared_secret(os.environ, node.nodes)
    folder = RunFolder.of(recipe)
    run = str(folder.root.resolve())
    if leftovers := leftover_processes(run, os.environ):
        pids = [process.pid for process in leftovers]
        print(f"keepstep: killing {len(pids)} leftover processes of an earlier attempt of this run: {pids}")
        kill(leftovers)
    if node.nodes > 1 and node.node_rank > 0:
        network.wait_for_head(node.head, node.port, network.JOIN_SECONDS)
    elif node.nodes > 1:
        network.check_free(address_of(node.head), node.port)
    name = run_id(node, os.environ)
    arguments = torchrun_arguments(node, folder.logs / socket.gethostname(), name, max_restarts)
    argv = [sys.executable, "-P", "-m", "launch.supervise.agent", *arguments, *command]
    env = os.environ | {"KEEPSTEP_RUN": run} | environment(node, os.environ) | dict(variables)
    peers = None
    if node.nodes > 1:
        peers = Peers(node.node_rank, address_of(node.head), node.port, name, node.nodes, secret)
    began = time.time()
    code = supervise(argv, env, stop_seconds, peers, lambda why: EventLog(folder.events)("lost_node", why=why))
    if code == FAILED and node.node_rank == 0:
        _print_cause(folder, began)
    return code


def _print_cause(folder: RunFolder, since: float) -> None:
    """Print why the ranks failed that were started since a moment, if anything says why."""
    found = diagnose_failure(folder.root, since)
    if found is not None and found.rule != "unknown":
        print(visible(f"keepstep: root cause: {in_one_line(found)} (keepstep diagnose {folder.root})"), file=sys.stderr)


def torchrun_arguments(node: Node, logs: Path, run: str, max_restarts: int) -> list[str]:
    """Return torchrun's arguments for this node, up to the command of the ranks."""
    is_host = "true" if node.node_rank == 0 else "false"  # torchrun's own guess compares host names
    return [
        f"--nnodes={node.nodes}",
        f"--nproc-per-node={node.ranks}",
        "--rdzv-backend=keepstep",  # launch/supervise/rendezvous.py
        f"--rdzv-endpoint={network.endpoint(node.head, node.port)}",
        f"--rdzv-id={run}",
        f"--rdzv-conf=is_host={is_host},join_timeout={network.JOIN_SECONDS}",
        f"--local-addr={node.address}",  # otherwise torchrun sends this machine's name to the others
        f"--max-restarts={max_restarts}",
        "--shutdown-timeout=8",  # seconds until SIGKILL for ranks whose peer failed: a stopped one ignores SIGTERM
        "--signals-to-handle=SIGQUIT",  # the supervisor and the ranks handle the others
        f"--log-dir={logs}",
        "--no-python",
        *("sh", "-c", REDIRECT, "sh"),  # writes the output of each rank to its file
    ]


def environment(node: Node, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the ranks need and that `env` does not set."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // node.ranks)),
        "GLOO_SOCKET_IFNAME": node.interface,  # otherwise gloo binds to the address of the host name
        "NCCL_SOCKET_IFNAME": node.interface,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a shared store keeps stale addresses over a restart
    }
    return {name: value for name, value in defaults.items() if name not in env}


def shared_secret(env: Mapping[str, str], nodes: int) -> bytes:
    """Return the job's secret, and warn if several nodes have none. LaunchError if it is too short."""
    secret = job_secret(env)
    if nodes > 1 and not secret:
        print(f"keepstep: {VARIABLE} is not set, so the nodes' messages are not authenticated", file=sys.stderr)
    return secret


def run_id(node: Node, env: Mapping[str, str]) -> str:
    """Return a name that all nodes of an attempt share, and that differs between attempts as far as can be known."""
    if "SLURM_JOB_ID" in env:
        return f"job{env['SLURM_JOB_ID']}.{env.get('SLURM_RESTART_COUNT', '0')}"
    if node.nodes > 1:
        return f"at-{node.port}"
    return f"{socket.gethostname()}-{os.getpid()}-{time.time():.0f}"


def choose_ranks(wanted: int | None, gpus: int, device: str) -> int:
    """Return the number of ranks on this machine: `wanted`, or one for each GPU, or 1. LaunchError if it is wrong."""
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
    """Return how many NVIDIA GPUs this process may use, without importing torch."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def this_node(ranks: int, nodes: int, node_rank: int | None, head: str | None) -> Node:
    """Return this machine's part in the run, from the options of `keepstep run`. LaunchError if they do not fit."""
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


def _slurm_node(env: Mapping[str, str]) -> int | None:
    """Return the node's number under `srun keepstep run` with one task on each node."""
    return int(env["SLURM_NODEID"]) if "SLURM_STEP_ID" in env else None
