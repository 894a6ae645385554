"""Findings about names, ports and clocks, and about connections between processes."""

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from launch.doctor import network as doctor_network
from launch.doctor.finding import Finding
from launch.doctor.network import (
    RANGE,
    check_connections,
    clock_finding,
    file_clock_finding,
    interface_finding,
    name_finding,
    port_findings,
    ports_here,
    skew_finding,
)
from launch.supervise.network import wait_for_head
from parallel.environ import FIRST_PORT, PORTS, World

FAR = range(32768, 61000)
PORT = FIRST_PORT + os.getpid() % PORTS
"""Differs between test sessions that run at the same time."""


@pytest.mark.parametrize(("address", "level"), [("127.0.1.1", "note"), (None, "note"), ("10.0.0.1", "ok")])
def test_a_name_that_resolves_to_loopback_is_a_note(address: str | None, level: str) -> None:
    assert name_finding("node", lambda _: address).level == level


def test_interfaces_are_listed_and_their_absence_is_a_note() -> None:
    assert interface_finding({"10.0.0.1": "eth0"}, ["mlx5_0"]).what == "network: eth0 10.0.0.1; RDMA devices: mlx5_0"
    assert interface_finding({}, []).level == "note"


@pytest.mark.parametrize(
    ("ephemeral", "reserved", "taken", "expected"),
    [
        (FAR, "", {}, [("ok", "ports 20000 to 29999 are free")]),
        (FAR, "", {20007: "in use"}, [("note", "1 of the ports 20000 to 29999 cannot be bound: 20007 (in use)")]),
        (FAR, "", dict.fromkeys(RANGE, "denied"), [("problem", "10000 of the ports 20000 to 29999")]),
        (
            range(15000, 61000),
            "",
            {},
            [("ok", "free"), ("note", "outgoing connections take ports from 15000 to 60999")],
        ),
        (range(15000, 61000), "80,20000-29999", {}, [("ok", "free")]),
    ],
)
def test_ports_that_a_run_may_not_get_are_reported(
    ephemeral: range, reserved: str, taken: dict[int, str], expected: list[tuple[str, str]]
) -> None:
    findings = list(port_findings(ephemeral, reserved, taken))
    assert [finding.level for finding in findings] == [level for level, _ in expected]
    assert all(what in finding.what for finding, (_, what) in zip(findings, expected, strict=True))


def test_a_port_on_which_a_program_listens_is_found() -> None:
    with socket.socket() as listener:
        free = next(port for port in RANGE if _binds(listener, port))
        listener.listen()
        assert any(str(free) in finding.what for finding in ports_here())


def _binds(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("", port))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("state", "level"), [(0, "ok"), (5, "note")])
def test_a_clock_that_is_not_synchronised_is_a_note(state: int, level: str) -> None:
    assert clock_finding(state).level == level


@pytest.mark.parametrize(("seconds", "level"), [(0.2, "ok"), (-3.0, "note"), (400.0, "problem")])
def test_a_wrong_clock_is_reported(seconds: float, level: str) -> None:
    finding = skew_finding(seconds, "n2")
    assert (finding.level, finding.what) == (level, f"the clock of n2 is {seconds:+.3f} s from this one")


def test_the_clock_of_the_local_file_system_is_right(tmp_path: Path) -> None:
    assert file_clock_finding(tmp_path).level == "ok"
    assert list(tmp_path.iterdir()) == []


def world(rank: int, size: int) -> World:
    return World(rank, size, 0, 1, head="127.0.0.1", port=PORT, launcher="slurm")


def connect(ranks: list[int], size: int) -> dict[int, list[Finding]]:
    found: dict[int, list[Finding]] = {}
    threads = [threading.Thread(target=lambda r=r: found.update({r: check_connections(world(r, size))})) for r in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_nodes_that_connect_compare_their_clocks(monkeypatch) -> None:
    monkeypatch.setattr(doctor_network, "CONNECT_SECONDS", 600.0)
    found = connect([0, 1, 2], 3)
    assert [finding.what for finding in found[0]] == ["all 2 other nodes connected"]
    for rank in (1, 2):
        assert [finding.level for finding in found[rank]] == ["ok", "ok"]
        assert "the clock of 127.0.0.1 is" in found[rank][1].what


def test_a_node_that_does_not_connect_and_a_head_that_does_not_answer_are_problems(monkeypatch) -> None:
    monkeypatch.setattr(doctor_network, "CONNECT_SECONDS", 0.5)
    (finding,) = connect([0], 2)[0]
    assert finding.level == "problem"
    assert "0 of 1 other nodes connected" in finding.what
    (finding,) = connect([1], 2)[1]
    assert finding.level == "problem"
    assert "on the first node cannot be reached: node 0 does not answer" in finding.what


def test_strangers_and_junk_neither_count_as_nodes_nor_stop_the_doctor(monkeypatch) -> None:
    monkeypatch.setattr(doctor_network, "CONNECT_SECONDS", 600.0)
    monkeypatch.setattr(doctor_network, "MOST_SILENT", 3)
    found: list[Finding] = []
    head = threading.Thread(target=lambda: found.extend(check_connections(world(0, 3))))
    head.start()
    port = FIRST_PORT + (PORT - FIRST_PORT + PORTS // 2) % PORTS
    wait_for_head("127.0.0.1", port, 600)
    address = ("127.0.0.1", port)
    silent = [socket.create_connection(address) for _ in range(6)]
    for junk in (b"\xff", b"\0" * 300, b"GET / HTTP/1.0\r\n\r\n", b"x rank 0\n", b"x rank 3\n", b"\xff rank 1\n"):
        with socket.create_connection(address) as stranger:
            stranger.sendall(junk)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(64) == b""  # closed without an answer
    connect([1], 3)
    assert not found
    connect([2], 3)
    head.join()
    assert [finding.what for finding in found] == ["all 2 other nodes connected"]
    for stranger in silent:
        stranger.close()


def test_an_answer_that_is_no_clock_is_a_problem(monkeypatch) -> None:
    monkeypatch.setattr(doctor_network, "wait_for_head", lambda *_: None)
    port = FIRST_PORT + (PORT - FIRST_PORT + PORTS // 2) % PORTS
    with socket.create_server(("127.0.0.1", port)) as stranger:

        def answer() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.recv(64)
                connection.sendall(b"nan\n")

        thread = threading.Thread(target=answer)
        thread.start()
        (finding,) = check_connections(world(1, 2))
        thread.join()
    assert finding.level == "problem"
    assert "the program there does not answer as keepstep does" in finding.what
