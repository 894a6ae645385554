"""Who am I? The rank, read from the environment that the launcher left. Pure: a mapping in, a `World` out.

The first that is found counts:

1. `RANK`, `WORLD_SIZE`, `LOCAL_RANK` ...: torchrun, DeepSpeed's launcher, or by hand;
2. `OMPI_COMM_WORLD_RANK` ..., `PMI_RANK` ... or `PMIX_RANK`: mpirun, or `srun --mpi=...`. The head is then still to be
   agreed on (`parallel/mpi.py`): `head` is "" and `port` 0 unless `MASTER_ADDR` and `MASTER_PORT` are set, and a place
   on the node that the launcher didn't tell reads 0 of 1;
3. `SLURM_PROCID` inside a step: `srun python -m train`;
4. nothing: a single process.

What contradicts itself is an error at once: otherwise ranks would wait for others that do not exist.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from parallel.errors import LaunchError

FIRST_PORT, PORTS = 20_000, 10_000
"""Ports taken from job ids: below the range that Linux gives to outgoing connections (32768 and up)."""


@dataclass(frozen=True)
class World:
    """This process's place among all ranks. `head` is where rank 0 listens."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    head: str
    port: int
    launcher: str
    """single, torchrun, deepspeed, env, mpi or slurm."""


def read_world(env: Mapping[str, str]) -> World:
    """Raises LaunchError, naming the variables, when they contradict each other or are not enough."""
    mpi = _mpi_names(env)
    in_step = "SLURM_PROCID" in env and "SLURM_STEP_ID" in env
    if "RANK" in env:
        world = _from_torch_names(env)
        if mpi and world.launcher == "env":
            _agree(env, "WORLD_SIZE", mpi[1])
    elif mpi:
        world = _from_mpi(env, *mpi)
    elif in_step:
        world = _from_slurm(env)
    else:
        world = _single(env)
    return _checked(world)


def _from_torch_names(env: Mapping[str, str]) -> World:
    local_size = "LOCAL_SIZE" if "LOCAL_WORLD_SIZE" not in env and "LOCAL_SIZE" in env else "LOCAL_WORLD_SIZE"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", local_size, "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not env.get(name)]
    if missing:
        raise LaunchError(
            f"RANK is set ({env['RANK']}) but {', '.join(missing)} is not; if it is left over from another program, "
            "`unset RANK WORLD_SIZE`, else start with torchrun, which sets them all"
        )
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "deepspeed" if local_size == "LOCAL_SIZE" else "env"
    return World(
        rank=_integer(env, "RANK"),
        world_size=_integer(env, "WORLD_SIZE"),
        local_rank=_integer(env, "LOCAL_RANK"),
        local_world_size=_integer(env, local_size),
        head=_head(env, ""),
        port=_port(env, 0),
        launcher=launcher,
    )


def _mpi_names(env: Mapping[str, str]) -> tuple[str, str, str, str] | None:
    """The variables of rank, size, local rank and local size that an MPI launcher set."""
    if "OMPI_COMM_WORLD_RANK" in env:
        return (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        )
    if "PMI_RANK" in env:
        return "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    if "PMIX_RANK" in env and "SLURM_STEP_NUM_TASKS" in env:
        return "PMIX_RANK", "SLURM_STEP_NUM_TASKS", "", ""
    return None


def _from_mpi(env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> World:
    _agree(env, "WORLD_SIZE", size)
    known = "MASTER_ADDR" in env and "MASTER_PORT" in env
    only = _integer(env, size) == 1
    return World(
        rank=_integer(env, rank),
        world_size=_integer(env, size),
        local_rank=_integer(env, local_rank) if local_rank in env else 0,
        local_world_size=_integer(env, local_size) if local_size in env else 1,
        head=_head(env, "") if known else "127.0.0.1" if only else "",
        port=_port(env, 0) if known else 0,
        launcher="mpi",
    )


def _from_slurm(env: Mapping[str, str]) -> World:
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    _agree(env, "WORLD_SIZE", size)
    nodes = expand_nodes(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
    per_node = expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
    node = _integer(env, "SLURM_NODEID")
    if node >= len(per_node) or len(per_node) != len(nodes) or sum(per_node) != _integer(env, size):
        raise LaunchError(
            f"Slurm's variables disagree: {size}={env.get(size)}, nodes {nodes}, tasks per node {per_node}, "
            f"SLURM_NODEID={node}; start the ranks with srun, from a shell without variables of another job"
        )
    job, step = _integer(env, "SLURM_JOB_ID"), _integer(env, "SLURM_STEP_ID")
    return World(
        rank=_integer(env, "SLURM_PROCID"),
        world_size=_integer(env, size),
        local_rank=_integer(env, "SLURM_LOCALID"),
        local_world_size=per_node[node],
        head=_head(env, nodes[0]),
        port=_port(env, job_port(job, step)),
        launcher="slurm",
    )


def _single(env: Mapping[str, str]) -> World:
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        if name in env and (name, env[name]) != ("WORLD_SIZE", "1"):
            raise LaunchError(
                f"{name} is set ({env[name]}) but RANK is not; `unset {name}` if it is left over from another "
                "program, else start with torchrun, srun or mpirun"
            )
    tasks = env.get("SLURM_NTASKS", "1")
    if tasks != "1" and "SLURM_JOB_ID" in env:
        raise LaunchError(
            f"job {env['SLURM_JOB_ID']} has SLURM_NTASKS={tasks} tasks, but this process was started without srun; "
            "use `srun python -m train ...`, or `srun --ntasks=1` for a single process"
        )
    return World(rank=0, world_size=1, local_rank=0, local_world_size=1, head="127.0.0.1", port=0, launcher="single")


def job_port(job: int, attempt: int) -> int:
    """A port of its own for each attempt of each job, so that two jobs on a node, or a late process, do not meet."""
    return FIRST_PORT + (job * 17 + attempt) % PORTS


def expand_nodes(text: str) -> list[str]:
    """The names in a Slurm node list: `a[1-3,07-09],login-1` gives a1 a2 a3 a07 a08 a09 login-1."""
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        prefixes = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", item):
            parts = [literal] if literal else [name for piece in ranges.split(",") for name in _range(piece)]
            prefixes = [prefix + part for prefix in prefixes for part in parts]
        names += prefixes
    return names


def _range(piece: str) -> list[str]:
    low, dash, high = piece.partition("-")
    if not dash:
        return [low]
    return [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]


def expand_counts(text: str) -> list[int]:
    """Slurm's tasks per node: `2(x3),1` gives 2 2 2 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _checked(world: World) -> World:
    for what, index, size in (
        ("rank", world.rank, world.world_size),
        ("local rank", world.local_rank, world.local_world_size),
        ("ranks on this node", world.local_world_size - 1, world.world_size),
    ):
        if not 0 <= index < size:
            raise LaunchError(f"the launcher's counts disagree: {what} {index} is not below {size} ({world})")
    return world


def _agree(env: Mapping[str, str], name: str, other: str) -> None:
    if name in env and env[name] != env.get(other):
        raise LaunchError(
            f"{name} ({env[name]}) contradicts {other} ({env.get(other)}); `unset {name}` if it is left over, "
            "or correct it"
        )


def _head(env: Mapping[str, str], default: str) -> str:
    return env.get("MASTER_ADDR", default).removeprefix("[").removesuffix("]")


def _port(env: Mapping[str, str], default: int) -> int:
    return _integer(env, "MASTER_PORT") if "MASTER_PORT" in env else default


def _integer(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "")
    if not value.isdecimal():
        raise LaunchError(f"{name} must be a whole number, not {value!r}; the launcher sets it")
    return int(value)
