"""What `keepstep run` derives from its options, without starting anything."""

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from launch import cli
from launch.supervise import network
from launch.supervise.local import (
    Node,
    choose_ranks,
    count_gpus,
    environment,
    run_id,
    shared_secret,
    torchrun_arguments,
)
from parallel.environ import job_port
from parallel.errors import LaunchError
from train.exit_codes import STOPPED

RECIPE = "recipes/laptop.yaml"


@pytest.mark.parametrize(
    ("wanted", "gpus", "device", "ranks"),
    [
        (None, 0, "auto", 1),
        (None, 4, "auto", 4),
        (None, 4, "cpu", 1),
        (2, 4, "auto", 2),
        (6, 0, "auto", 6),
        (6, 4, "cpu", 6),
    ],
)
def test_there_is_one_rank_for_each_gpu_by_default(wanted, gpus, device, ranks):
    assert choose_ranks(wanted, gpus, device) == ranks


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(LaunchError, match=re.escape("--ranks (8) is more than this machine's GPUs (4); use --ranks 4")):
        choose_ranks(8, 4, "auto")


def test_visible_devices_are_counted():
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,2,5"}) == 3
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "2"], "--nodes 2 needs --node-rank (0 to 1) and --head HOST:PORT on every node"),
        (["--nodes", "2", "--node-rank", "2", "--head", "h:1"], "--node-rank (2) must be from 0 to --nodes - 1 (1)"),
        (["--nodes", "0"], "--nodes (0) must be at least 1"),
        (["--node-rank", "1"], "--node-rank (1) is for several nodes; add --nodes N"),
        (["--ranks", "0"], "--ranks (0) must be at least 1"),
        (["--json"], "--json is for --fake-world"),
        (
            ["--nodes", "2", "--node-rank", "1", "--head", "::1:29400"],
            "write an IPv6 address in brackets, such as [::1]",
        ),
        (
            ["--nodes", "2", "--node-rank", "1", "--head", "nowhere.invalid:29400"],
            "cannot resolve the head node's name nowhere.invalid",
        ),
        (["train.stepz=3"], "did you mean train.steps?"),
    ],
)
def test_options_that_do_not_fit_end_immediately_with_code_2(options, message, capsys):
    assert cli.main(["run", RECIPE, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_taken_port_is_reported_before_anything_starts(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} of this machine .* is taken"):
            network.check_free("127.0.0.1", port)


def test_a_head_that_does_not_answer_is_reported():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(
        LaunchError, match=rf"node 0 does not answer at 127.0.0.1:{port} after 0 s \(Connection refused\)"
    ):
        network.wait_for_head("127.0.0.1", port, 0)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.1:29400", "10.0.0.1", 29400), ("[::1]:29400", "::1", 29400), ("a.b.example:1", "a.b.example", 1)],
)
def test_a_head_is_a_name_an_address_or_ipv6_in_brackets(text, host, port):
    assert network.parse_endpoint(text) == (host, port)
    assert network.endpoint(host, port) == text


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:0", "host:70000", "host:port"])
def test_a_head_without_host_or_port_is_refused(text):
    with pytest.raises(LaunchError, match=re.escape(f"--head {text} must read HOST:PORT")):
        network.parse_endpoint(text)


def test_node_0_alone_hosts_the_rendezvous():
    for rank, host in ((0, "true"), (1, "false")):
        node = Node(4, nodes=2, node_rank=rank, head="10.0.0.1", port=29400, address="10.0.0.2", interface="ib0")
        arguments = torchrun_arguments(node, Path("logs"), "run", max_restarts=3)
        assert f"--rdzv-conf=is_host={host},join_timeout=280" in arguments
        assert "--rdzv-endpoint=10.0.0.1:29400" in arguments
        assert environment(node, {})["NCCL_SOCKET_IFNAME"] == "ib0"
    assert environment(Node(2), {})["NCCL_SOCKET_IFNAME"] == "lo"


def test_variables_that_the_user_has_set_are_not_changed():
    assert "OMP_NUM_THREADS" not in environment(Node(2), {"OMP_NUM_THREADS": "3"})


def test_nodes_without_a_secret_say_so_and_a_short_one_is_refused(capsys):
    assert shared_secret({}, 2) == b""
    assert "KEEPSTEP_JOB_SECRET is not set" in capsys.readouterr().err
    assert shared_secret({"KEEPSTEP_JOB_SECRET": "x" * 16}, 2) == b"x" * 16
    assert shared_secret({}, 1) == b""
    assert capsys.readouterr().err == ""
    with pytest.raises(LaunchError, match="KEEPSTEP_JOB_SECRET has 15 characters, but it needs at least 16"):
        shared_secret({"KEEPSTEP_JOB_SECRET": "x" * 15}, 1)


def test_each_attempt_of_a_job_has_its_own_rendezvous_id():
    job = {"SLURM_JOB_ID": "7"}
    assert run_id(Node(1), job) == "job7.0"
    assert run_id(Node(1), job | {"SLURM_RESTART_COUNT": "2"}) == "job7.2"


def test_a_stop_before_the_ranks_start_is_a_stop_and_no_failure(monkeypatch, capsys):
    monkeypatch.setattr(network, "wait_for_head", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr("launch.supervise.local.reached_at", lambda *_: ("10.0.0.8", "eth0"))
    options = ["run", RECIPE, "--nodes=2", "--node-rank=1", "--head=127.0.0.1:29400"]
    assert cli.main(options) == STOPPED
    assert "the start was stopped (SIGTERM)" in capsys.readouterr().err


def test_the_job_script_gets_the_port_that_ranks_compute(capsys):
    assert network.main(["port", "7", "2"]) == 0
    assert int(capsys.readouterr().out) == job_port(7, 2)
