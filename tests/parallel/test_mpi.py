"""Real mpirun: ranks connect without a given address, and an MPI library that does not fit is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.environ import World, read_world
from parallel.errors import LaunchError
from parallel.mpi import meet

RANK = Path(__file__).with_name("mpi_rank.py")
MPIRUN = [str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root", "--oversubscribe"]


def start(argv: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | env
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600, check=False)


def test_ranks_under_mpirun_connect_without_address_and_port():
    result = start([*MPIRUN, "-n", "3", sys.executable, str(RANK)])
    assert result.returncode == 0, result.stderr
    lines = sorted(line for line in result.stdout.splitlines() if line)
    assert lines == [f"rank {rank} of 3 local {rank} of 3 sum 3.0" for rank in range(3)]


def test_singletons_of_another_mpi_are_refused_instead_of_training_alone():
    """`srun --mpi=pmi2` does this with Open MPI: each of 2 ranks sees an MPI world of one rank."""
    result = start([sys.executable, str(RANK)], PMI_RANK="1", PMI_SIZE="2")
    assert result.returncode == 2
    assert re.search(r"the launcher reports rank 1 of 2, but Open MPI .* reports rank 0 of 1", result.stdout)


def test_left_over_world_size_under_mpirun_is_refused():
    result = start([*MPIRUN, "-n", "2", sys.executable, str(RANK)], WORLD_SIZE="8")
    assert result.returncode == 2
    assert "WORLD_SIZE (8) contradicts OMPI_COMM_WORLD_SIZE (2)" in result.stdout


def test_the_world_of_other_launchers_stays_unchanged():
    world = read_world({})
    assert meet(world) is world


def test_missing_mpi4py_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(LaunchError, match="mpirun started 2 ranks, but mpi4py cannot be imported"):
        meet(World(0, 2, 0, 1, "", 0, "mpi"))
