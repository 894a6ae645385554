"""What makes a node unhealthy."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch.doctor.finding import Finding
from launch.supervise.health import (
    check_node,
    clock_problems,
    compare,
    judge,
    main,
    memory_problems,
    missing,
    read_figures,
)
from parallel.addresses import own_addresses

LOW_LIMITS = ("--min-free-gib", "0.001", "--min-memory-gib", "0.001")


def check(run: Path, nodes: int, head: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "launch.supervise.health",
        "check",
        "--run",
        str(run),
        "--nodes",
        str(nodes),
        "--head",
        head,
    ]


def figures(node: str, seconds: float = 0.1) -> dict:
    return {"node": node, "matmul_seconds": seconds}


def test_a_healthy_node_prints_so(tmp_path):
    argv = [*check(tmp_path, 1, "127.0.0.1:1"), *LOW_LIMITS]
    result = subprocess.run(argv, capture_output=True, text=True, check=True, env={"SLURMD_NODENAME": "n7"})
    assert result.stdout == "healthy n7\n"


def test_missing_gpus_and_a_full_disk_are_reported(tmp_path):
    argv = check(tmp_path, 1, "127.0.0.1:1")
    env = {"SLURMD_NODENAME": "n7", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    result = subprocess.run([*argv, "--min-free-gib", "1e9"], capture_output=True, text=True, check=True, env=env)
    assert result.stdout.startswith("unhealthy n7: 3 GPUs visible, 4 expected; ")
    assert f"GiB free in {tmp_path}, 1000000000.0 needed" in result.stdout


def test_foreign_processes_are_reported():
    assert memory_problems("0, 3\n1, [N/A]\n2, 30000\n") == ["GPU 2 has 30000 MiB in use by another process"]
    assert memory_problems("") == []


def test_a_fault_of_any_gpu_makes_a_node_unhealthy(tmp_path, monkeypatch):
    found = [Finding("note", "Xid 31"), Finding("problem", "GPU 5 has rows to remap at its next reset")]
    monkeypatch.setattr("launch.supervise.health.gpu_findings", lambda: found)
    monkeypatch.setattr("launch.supervise.health.count_gpus", lambda _: 8)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    assert check_node(tmp_path, 0.0, 0.0) == ["GPU 5 has rows to remap at its next reset"]


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        (figures("n1"), None),
        (figures("n1", seconds=0.5), "a matrix product takes 0.5000 s, 0.1000 s on the other nodes"),
    ],
)
def test_a_node_that_differs_from_the_others_is_reported(own, problem):
    everyone = [own, figures("n2"), figures("n3")]
    assert compare("n1", own, everyone) == ([problem] if problem else [])
    assert compare("n2", figures("n2"), everyone) == []


@pytest.mark.parametrize(
    "text",
    [
        *(None, b"", b"\xff", b"[]", b"null", b"[" * 100_000, b'{"node": "n1"}', b'{"node": 1, "matmul_seconds": 0.1}'),
        *(
            b'{"node": "n1", "matmul_seconds": %s}' % seconds
            for seconds in (b"NaN", b"-1.0", b"1e999", b'"x"', b"null")
        ),
    ],
)
def test_figures_that_no_node_of_the_job_sent_are_ignored(text):
    assert read_figures(text) is None
    assert read_figures(b'{"node": "n1", "matmul_seconds": 0.1}') == figures("n1")


def test_nodes_that_do_not_answer_are_named():
    everyone = {0: figures("n1"), 2: figures("n10")}
    assert missing(everyone, {"SLURM_STEP_NODELIST": "n[1-2],n10"}) == ["n2"]


@pytest.mark.parametrize(
    ("clocks", "expected"),
    [
        ([1000.0, 1000.4, 1000.2], [None, None, None]),
        ([1000.0, 1000.0, 1009.0], [None, None, "+9"]),
        ([900.0, 1000.0, 1000.0], ["-100", None, None]),
        ([1000.0, 1030.0], [None, "+30"]),
    ],
)
def test_the_node_whose_clock_is_wrong_is_reported(clocks, expected):
    for rank, seconds in enumerate(expected):
        problems = [f"its clock is {seconds} s from the others'"] if seconds else []
        assert clock_problems(rank, clocks) == problems


@pytest.mark.parametrize(
    ("lines", "excluded"),
    [
        (["healthy n1", "healthy n2", "healthy n3"], []),
        (["healthy n1", "unhealthy n2: no disk", "healthy n3"], ["n2"]),
        (["healthy n1", "unhealthy n3: did not answer within 60 s", "healthy n3"], ["n2", "n3"]),
        (["n2: the head at n1:1 does not answer: refused", "healthy n2", "healthy n3"], ["n1"]),
        (["unhealthy n1: disk full", "unhealthy n2: disk full", "unhealthy n3: disk full"], []),
        ([], []),
    ],
)
def test_unhealthy_and_silent_nodes_are_excluded_unless_all_are(lines, excluded):
    assert judge(lines, ["n1", "n2", "n3"]) == excluded


def test_a_job_of_one_unhealthy_node_moves_to_another(tmp_path, capsys):
    (tmp_path / "health").write_text("unhealthy n07: GPU 1 has 2 uncorrected ECC errors\n")
    assert main(["judge", str(tmp_path / "health"), "n[07]"]) == 0
    assert capsys.readouterr().out == "n07\n"


def test_two_nodes_run_an_all_reduce_and_compare(tmp_path):
    argv = [*check(tmp_path, 2, f"{own_address()}:{free_port()}"), *LOW_LIMITS]
    nodes = [
        subprocess.Popen(
            argv, stdout=subprocess.PIPE, text=True, env={"SLURMD_NODENAME": f"n{i}", "SLURM_PROCID": f"{i}"}
        )
        for i in range(2)
    ]
    assert [node.communicate(timeout=600)[0] for node in nodes] == ["healthy n0\n", "healthy n1\n"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def own_address() -> str:
    addresses = [address for address in own_addresses() if ":" not in address]
    if not addresses:
        pytest.skip("this machine has no network interface but loopback")
    return addresses[0]
