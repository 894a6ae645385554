"""The variables of every launcher, as plain dictionaries, and contradictions that must be refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.environ import FIRST_PORT, PORTS, World, expand_counts, expand_nodes, job_port, read_world
from parallel.errors import LaunchError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "run",
}
DEEPSPEED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


def test_without_a_launcher_it_is_a_single_process():
    assert read_world({"HOME": "/root"}) == World(0, 1, 0, 1, "127.0.0.1", 0, "single")


def test_torchrun_is_read():
    assert read_world(TORCHRUN) == World(5, 8, 1, 4, "10.0.0.7", 29400, "torchrun")


def test_torchrun_under_srun_uses_torchruns_ranks_and_not_slurms_tasks():
    assert read_world(SLURM | TORCHRUN) == read_world(TORCHRUN)


def test_deepspeeds_launcher_is_read():
    assert read_world(DEEPSPEED) == World(1, 2, 1, 2, "h", 29500, "deepspeed")


def test_open_mpi_is_read_and_leaves_the_head_open():
    assert read_world(OPEN_MPI) == World(3, 4, 1, 2, "", 0, "mpi")


def test_open_mpi_takes_a_given_head():
    world = read_world(OPEN_MPI | {"MASTER_ADDR": "[fe80::1]", "MASTER_PORT": "29500"})
    assert (world.head, world.port) == ("fe80::1", 29500)


def test_mpich_is_read():
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert read_world(env) == World(1, 2, 1, 2, "", 0, "mpi")


def test_srun_with_pmix_takes_the_size_from_slurm():
    world = read_world(SLURM | {"PMIX_RANK": "3"})
    assert (world.rank, world.world_size, world.launcher) == (3, 5, "mpi")


def test_srun_is_read_with_a_port_for_the_step():
    assert read_world(SLURM) == World(3, 5, 1, 2, "gpu07", job_port(71, 2), "slurm")


def test_srun_takes_an_exported_head():
    world = read_world(SLURM | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "12345", "WORLD_SIZE": "5"})
    assert (world.head, world.port) == ("10.1.1.1", 12345)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"RANK": "0"},
            "RANK is set (0) but WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "`unset RANK WORLD_SIZE` if they are left over from another program"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set (2) but RANK is not; `unset WORLD_SIZE` if it is left over"),
        (TORCHRUN | {"WORLD_SIZE": "5"}, "rank 5 is not below 5"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local rank 4 is not below 4"),
        (TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2"}, "ranks on this node 3 is not below 2"),
        (TORCHRUN | {"WORLD_SIZE": "eight"}, "WORLD_SIZE must be an integer, not 'eight'"),
        (OPEN_MPI | {"WORLD_SIZE": "2"}, "WORLD_SIZE (2) contradicts OMPI_COMM_WORLD_SIZE (4)"),
        (SLURM | {"WORLD_SIZE": "8"}, "WORLD_SIZE (8) contradicts SLURM_STEP_NUM_TASKS (5)"),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            "Slurm's variables contradict each other: SLURM_STEP_NUM_TASKS=5",
        ),
        (SLURM | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "was started without srun; use `srun"),
        (
            {k: v for k, v in TORCHRUN.items() if k != "TORCHELASTIC_RUN_ID"} | OPEN_MPI,
            "WORLD_SIZE (8) contradicts OMPI_COMM_WORLD_SIZE (4)",
        ),
    ],
)
def test_contradictions_are_refused_immediately(env, message):
    with pytest.raises(LaunchError, match=re.escape(message)):
        read_world(env)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[007-009,11],login-1", ["gpu007", "gpu008", "gpu009", "gpu11", "login-1"]),
        ("a-b[1-2]-ib", ["a-b1-ib", "a-b2-ib"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("", []),
    ],
)
def test_node_lists_with_ranges_and_dashes(text, names):
    assert expand_nodes(text) == names


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_task_counts_survive_slurms_shorthand(counts):
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_counts(text) == counts


@given(st.integers(1, 10**9), st.integers(0, 50))
def test_ports_stay_below_the_ephemeral_range_and_differ_between_attempts(job, attempt):
    assert FIRST_PORT <= job_port(job, attempt) < FIRST_PORT + PORTS < 32_768
    assert job_port(job, attempt) != job_port(job, attempt + 1)


@pytest.mark.parametrize(
    "text", ["linux[1", "a[3-1]", "a[1-]", "a[-3]", "a[]", "a]", "a[x]", "a,,b", ",a", "a,", "a[1-2]]", "a b", "a[1,]"]
)
def test_a_malformed_node_list_is_refused(text):
    with pytest.raises(LaunchError, match=re.escape(f"{text!r} is not a Slurm node list")):
        expand_nodes(text)


@pytest.mark.parametrize("text", ["2(x3", "2(x0)", "two", "2,", "2(x3)1", "-1", "2 (x3)"])
def test_malformed_task_counts_are_refused(text):
    with pytest.raises(LaunchError, match=re.escape(f"{text!r} is not a list of task counts")):
        expand_counts(text)


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "4"},
        {"SLURM_NTASKS": "1", "SLURM_NPROCS": "2"},
        {"SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "2(x2)"},
        {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2"},
    ],
)
def test_task_counts_of_a_job_that_contradict_each_other_are_refused_in_a_plain_start(env):
    with pytest.raises(LaunchError, match="the task counts of job 7 contradict each other: SLURM_NTASKS gives"):
        read_world({"SLURM_JOB_ID": "7", **env})


def test_a_plain_start_in_a_job_of_one_task_is_a_single_process():
    env = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_NPROCS": "1", "SLURM_TASKS_PER_NODE": "1"}
    assert read_world(env).launcher == "single"
    assert read_world({"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "64"}).launcher == "single"  # it counts CPUs
    with pytest.raises(LaunchError, match=re.escape("job 7 has SLURM_NTASKS_PER_NODE x SLURM_NNODES=2 tasks")):
        read_world({"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "2"})
