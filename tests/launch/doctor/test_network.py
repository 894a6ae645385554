"""What the doctor makes of names, ports and clocks; and processes that call each other."""

import os
import socket
import threading
from pathlib import Path

import pytest

from launch.doctor import network as doctor_network
from launch.doctor.finding import Finding
from launch.doctor.network import (
    RANGE,
    clock_finding,
    file_clock_finding,
    interface_finding,
    meet,
    name_finding,
    port_findings,
    ports_here,
    skew_finding,
)
from parallel.environ import FIRST_PORT, PORTS, World

FAR = range(32768, 61000)
PORT = FIRST_PORT + os.getpid() % PORTS
"""Other sessions of these tests meet elsewhere."""


@pytest.mark.parametrize(("address", "level"), [("127.0.1.1", "note"), (None, "note"), ("10.0.0.1", "ok")])
def test_a_name_that_means_loopback_is_noted(address: str | None, level: str) -> None:
    assert name_finding("node", lambda _: address).level == level


def test_interfaces_are_listed_and_their_absence_noted() -> None:
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
def test_ports_that_a_run_may_not_get_are_told(
    ephemeral: range, reserved: str, taken: dict[int, str], expected: list[tuple[str, str]]
) -> None:
    findings = list(port_findings(ephemeral, reserved, taken))
    assert [finding.level for finding in findings] == [level for level, _ in expected]
    assert all(what in finding.what for finding, (_, what) in zip(findings, expected, strict=True))


def test_a_port_that_somebody_listens_on_is_found() -> None:
    with socket.socket() as somebody:
        free = next(port for port in RANGE if _binds(somebody, port))
        somebody.listen()
        assert any(str(free) in finding.what for finding in ports_here())


def _binds(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("", port))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("state", "level"), [(0, "ok"), (5, "note")])
def test_a_clock_that_nobody_sets_is_noted(state: int, level: str) -> None:
    assert clock_finding(state).level == level


@pytest.mark.parametrize(("seconds", "level"), [(0.2, "ok"), (-3.0, "note"), (400.0, "problem")])
def test_a_clock_that_is_off_is_told(seconds: float, level: str) -> None:
    finding = skew_finding(seconds, "n2")
    assert (finding.level, finding.what) == (level, f"the clock of n2 is {seconds:+.3f} s from this one")


def test_the_clock_of_the_files_here_is_right(tmp_path: Path) -> None:
    assert file_clock_finding(tmp_path).level == "ok"
    assert list(tmp_path.iterdir()) == []


def world(rank: int, size: int) -> World:
    return World(rank, size, 0, 1, head="127.0.0.1", port=PORT, launcher="slurm")


def together(ranks: list[int], size: int) -> dict[int, list[Finding]]:
    found: dict[int, list[Finding]] = {}
    threads = [threading.Thread(target=lambda r=r: found.update({r: meet(world(r, size))})) for r in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return found


def test_nodes_that_call_each_other_compare_their_clocks() -> None:
    found = together([0, 1, 2], 3)
    assert [finding.what for finding in found[0]] == ["all 2 others called"]
    for rank in (1, 2):
        assert [finding.level for finding in found[rank]] == ["ok", "ok"]
        assert "the clock of 127.0.0.1 is" in found[rank][1].what


def test_a_node_that_does_not_call_and_a_head_that_does_not_answer_are_problems(monkeypatch) -> None:
    monkeypatch.setattr(doctor_network, "MEET_SECONDS", 0.5)
    (finding,) = together([0], 2)[0]
    assert finding.level == "problem"
    assert "0 of 1 others called" in finding.what
    (finding,) = together([1], 2)[1]
    assert finding.level == "problem"
    assert "on the first node is not reached: node 0 does not answer" in finding.what
