"""This process's rank, read from the launcher's environment variables. Pure: a mapping in, a `World` out.

The first of these that is set decides:

1. `RANK`, `WORLD_SIZE`, `LOCAL_RANK` ...: torchrun, DeepSpeed's launcher, or a start by hand;
2. `OMPI_COMM_WORLD_RANK` ..., `PMI_RANK` ... or `PMIX_RANK`: mpirun, or `srun --mpi=...`. `parallel/mpi.py` then fills
   in what is missing: `head` is "" and `port` 0 unless `MASTER_ADDR` and `MASTER_PORT` are set, and an unknown local
   rank is 0 of 1;
3. `SLURM_PROCID` inside a job step: `srun python -m train`;
4. none: a single process.

Contradictions raise an error immediately: otherwise ranks would wait for ranks that do not exist.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from parallel.errors import LaunchError

FIRST_PORT, PORTS = 20_000, 10_000
"""Range of ports taken from job ids, below the range that Linux uses for outgoing connections (32768 and up)."""

NODE = r"([\w.-]|\[\d+(-\d+)?(,\d+(-\d+)?)*\])+"
"""One name of a Slurm node list, with ranges in brackets."""
COUNT = r"\d+(\(x[1-9]\d*\))?"
"""One item of Slurm's task counts."""


@dataclass(frozen=True)
class World:
    """This process's place among all ranks."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    head: str
    """Host name or address of rank 0, where it listens on `port`."""
    port: int
    launcher: str
    """single, torchrun, deepspeed, env, mpi, slurm, or fake in an analysis."""


def read_world(env: Mapping[str, str]) -> World:
    """The world that the environment describes.

    Raises LaunchError, with the names of the variables, if they contradict each other or some are missing."""
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
            f"RANK is set ({env['RANK']}) but {', '.join(missing)} is not; `unset RANK WORLD_SIZE` if they are left "
            "over from another program, else start with torchrun, which sets them all"
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
    """Names of the variables with an MPI launcher's rank, size, local rank and local size; None without one."""
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
    head_known = "MASTER_ADDR" in env and "MASTER_PORT" in env
    one_rank = _integer(env, size) == 1
    return World(
        rank=_integer(env, rank),
        world_size=_integer(env, size),
        local_rank=_integer(env, local_rank) if local_rank in env else 0,
        local_world_size=_integer(env, local_size) if local_size in env else 1,
        head=_head(env, "") if head_known else "127.0.0.1" if one_rank else "",
        port=_port(env, 0) if head_known else 0,
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
            f"Slurm's variables contradict each other: {size}={env.get(size)}, nodes {nodes}, tasks per node "
            f"{per_node}, SLURM_NODEID={node}; start the ranks with srun, from a shell without variables of another job"
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
    counts = _slurm_tasks(env) if "SLURM_JOB_ID" in env else {}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} gives {count}" for name, count in counts.items())
        raise LaunchError(
            f"the task counts of job {env['SLURM_JOB_ID']} contradict each other: {told}; ask for tasks in one way "
            "(--ntasks, or --nodes and --ntasks-per-node), and start the ranks with `srun python -m train ...`"
        )
    if tasks := max(counts.values(), default=1) - 1:
        raise LaunchError(
            f"job {env['SLURM_JOB_ID']} has {next(iter(counts))}={tasks + 1} tasks, but this process was started "
            "without srun; use `srun python -m train ...`, or `srun --ntasks=1` for a single process"
        )
    return World(rank=0, world_size=1, local_rank=0, local_world_size=1, head="127.0.0.1", port=0, launcher="single")


def _slurm_tasks(env: Mapping[str, str]) -> dict[str, int]:
    """The number of tasks that a job has according to each variable that tells it."""
    found = {name: _integer(env, name) for name in ("SLURM_NTASKS", "SLURM_NPROCS") if name in env}
    if found and env.get("SLURM_TASKS_PER_NODE"):  # without --ntasks Slurm counts CPUs there
        found["SLURM_TASKS_PER_NODE"] = sum(expand_counts(env["SLURM_TASKS_PER_NODE"]))
    if "SLURM_NTASKS_PER_NODE" in env:
        nodes = _integer(env, "SLURM_NNODES") if "SLURM_NNODES" in env else 1
        found["SLURM_NTASKS_PER_NODE x SLURM_NNODES"] = nodes * _integer(env, "SLURM_NTASKS_PER_NODE")
    return found


def job_port(job: int, attempt: int) -> int:
    """A port for one attempt of a job. Other jobs on the node, and processes of earlier attempts, use other ports."""
    return FIRST_PORT + (job * 17 + attempt) % PORTS


def expand_nodes(text: str) -> list[str]:
    """The host names of a Slurm node list: `a[1-3,07-09],login-1` gives a1 a2 a3 a07 a08 a09 login-1.

    LaunchError if the text is none."""
    if not re.fullmatch(rf"({NODE}(,{NODE})*)?", text):
        raise LaunchError(f"{text!r} is not a Slurm node list such as n[1-3,07],login-1; check SLURM_JOB_NODELIST")
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        prefixes = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", item):
            parts = [literal] if literal else [name for piece in ranges.split(",") for name in _range(piece, text)]
            prefixes = [prefix + part for prefix in prefixes for part in parts]
        names += prefixes
    return names


def _range(piece: str, text: str) -> list[str]:
    """The numbers of `07-09` or `11`, with their leading zeros. LaunchError if the range of this list runs backward."""
    low, _, high = piece.partition("-")
    if high and int(high) < int(low):
        raise LaunchError(f"{text!r} is not a Slurm node list: its range {piece} runs backward")
    return [f"{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1)]


def expand_cpus(text: str) -> set[int]:
    """The CPUs of the kernel's list: `0-2,8` gives 0 1 2 8. ValueError if the text is none."""
    found: set[int] = set()
    for item in filter(None, text.strip().split(",")):
        low, _, high = item.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def expand_counts(text: str) -> list[int]:
    """The tasks of each node from Slurm's shorthand: `2(x3),1` gives 2 2 2 1. LaunchError if the text is none."""
    if not re.fullmatch(rf"({COUNT}(,{COUNT})*)?", text):
        raise LaunchError(f"{text!r} is not a list of task counts such as 2(x3),1; check SLURM_TASKS_PER_NODE")
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _checked(world: World) -> World:
    """The world itself. Raises LaunchError if a rank is not below its count."""
    for what, index, size in (
        ("rank", world.rank, world.world_size),
        ("local rank", world.local_rank, world.local_world_size),
        ("ranks on this node", world.local_world_size - 1, world.world_size),
    ):
        if not 0 <= index < size:
            raise LaunchError(
                f"the launcher's counts contradict each other: {what} {index} is not below {size} ({world}); "
                "check the launcher's command and its environment variables"
            )
    return world


def _agree(env: Mapping[str, str], name: str, other: str) -> None:
    """Raise LaunchError if the first variable is set and differs from the second."""
    if name in env and env[name] != env.get(other):
        raise LaunchError(
            f"{name} ({env[name]}) contradicts {other} ({env.get(other)}); `unset {name}` if it is left over from "
            "another program, or correct it"
        )


def _head(env: Mapping[str, str], default: str) -> str:
    return env.get("MASTER_ADDR", default).removeprefix("[").removesuffix("]")


def _port(env: Mapping[str, str], default: int) -> int:
    return _integer(env, "MASTER_PORT") if "MASTER_PORT" in env else default


def _integer(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "")
    if not value.isdecimal():
        raise LaunchError(
            f"{name} must be an integer, not {value!r}; the launcher sets it, so check how it was started"
        )
    return int(value)
