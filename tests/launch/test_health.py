"""What makes a node unfit."""

import subprocess
import sys

import pytest

from launch.health import compare, gpu_problems, missing


def figures(node: str, seconds: float = 0.1, clock: float = 1000.0) -> dict:
    return {"node": node, "matmul_seconds": seconds, "clock": clock}


def test_a_fit_node_says_so(tmp_path):
    argv = [sys.executable, "-m", "launch.health", "--run", str(tmp_path), "--nodes", "1", "--head", "127.0.0.1:1"]
    argv += ["--min-free-gib", "0.001", "--min-memory-gib", "0.001"]
    result = subprocess.run(argv, capture_output=True, text=True, check=True, env={"SLURMD_NODENAME": "n7"})
    assert result.stdout == "healthy n7\n"


def test_missing_gpus_and_a_full_disk_are_told(tmp_path):
    argv = [sys.executable, "-m", "launch.health", "--run", str(tmp_path), "--nodes", "1", "--head", "127.0.0.1:1"]
    env = {"SLURMD_NODENAME": "n7", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    result = subprocess.run([*argv, "--min-free-gib", "1e9"], capture_output=True, text=True, check=True, env=env)
    assert result.stdout.startswith("unhealthy n7: 3 GPUs visible, 4 expected; ")
    assert f"GiB free in {tmp_path}, 1000000000.0 needed" in result.stdout


def test_ecc_errors_and_foreign_processes_are_told():
    csv = "0, 0, 3\n1, 2, 3\n2, [N/A], 30000\n"
    assert gpu_problems(csv) == [
        "GPU 1 has 2 uncorrected ECC errors",
        "GPU 2 has 30000 MiB in use by another process",
    ]


@pytest.mark.parametrize(
    ("mine", "problem"),
    [
        (figures("n1"), None),
        (figures("n1", seconds=0.5), "a matrix product takes 0.5000 s, 0.1000 s on the other nodes"),
        (figures("n1", clock=2000.0), "its clock is +1000 s from the others'"),
    ],
)
def test_a_node_that_differs_from_the_others_is_told(mine, problem):
    everyone = [mine, figures("n2"), figures("n3")]
    assert compare("n1", mine, everyone) == ([problem] if problem else [])
    assert compare("n2", figures("n2"), everyone) == []


def test_nodes_that_do_not_answer_are_named():
    everyone = {0: figures("n1"), 2: figures("n10")}
    assert missing(everyone, {"SLURM_STEP_NODELIST": "n[1-2],n10"}) == ["n2"]
