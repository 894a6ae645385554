"""Which node counts as lost, and real heartbeats between nodes."""

import socket
import time
from collections.abc import Callable

import pytest

from launch.supervise.datagrams import Message, Silence
from launch.supervise.peer_table import LOST_ROUNDS, SOON_ROUNDS, PeerTable
from launch.supervise.peers import Peers
from parallel.errors import LaunchError

SECRET = b"a secret of the job"


def beat(node: int, code: int | None = None, silent: tuple[Silence, ...] = ()) -> Message:
    return Message(node, "abcd"[node], "", "", 1, code, silent)


def after(*messages: Message) -> PeerTable:
    table = PeerTable()
    for message in messages:
        table.receive(message)
    return table


def wait(table: PeerTable, rounds: int) -> PeerTable:
    for _ in range(rounds):
        table.next_round()
    return table


def test_a_node_without_heartbeats_is_lost_after_a_while_and_sooner_in_a_hurry():
    table = wait(after(beat(1)), SOON_ROUNDS)
    assert table.lost(hurry=True) is None
    wait(table, 1)
    assert table.lost(hurry=False) is None
    assert table.lost(hurry=True) == "node 1 (b) has not answered for 6 s"
    wait(table, LOST_ROUNDS)
    assert table.lost(hurry=False) == "node 1 (b) has not answered for 26 s"
    table.receive(beat(1))
    assert table.lost(hurry=True) is None


@pytest.mark.parametrize(("code", "lost"), [(0, None), (75, None), (1, "node 1 (b) failed"), (2, "node 1 (b) failed")])
def test_a_node_that_leaves_is_lost_only_if_it_failed(code, lost):
    table = wait(after(beat(1), beat(1, code)), SOON_ROUNDS + 1)
    assert table.lost(hurry=False) == lost


def test_a_node_that_never_sent_a_heartbeat_is_not_lost():
    assert wait(PeerTable(), LOST_ROUNDS + 1).lost(hurry=True) is None


def test_nodes_learn_from_the_head_which_nodes_are_lost():
    head = wait(after(beat(1), beat(2)), 4)
    head.receive(beat(1))
    worker = after(beat(0, silent=head.report()))
    assert wait(worker, 2).lost(hurry=True) == "node 2 (c) has not answered for 6 s"
    worker.receive(beat(0, silent=after(beat(1), beat(2)).report()))
    assert wait(worker, 3).lost(hurry=True) is None


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nodes_receive_each_others_heartbeats_and_failures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("launch.supervise.peers.ROUND_SECONDS", 0.02)
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [Peers(rank, "127.0.0.1", port, "job1.0", 3, SECRET) for rank in range(3)]
    try:
        for node in nodes:
            node.start()
        wait_until(lambda: not nodes[0].missing({}))
        wait_until(lambda: [node.lost(hurry=True) for node in nodes] == [None] * 3)
        nodes[1].leave(1)
        failed = f"node 1 ({socket.gethostname()}) failed"
        wait_until(lambda: [nodes[rank].lost(hurry=False) for rank in (0, 2)] == [failed] * 2)
    finally:
        for node in nodes:
            node.leave(0)


def test_a_taken_port_is_named():
    with socket.socket(type=socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        head = Peers(0, "127.0.0.1", port, "job1.0", 2)
        with pytest.raises(LaunchError, match=f"UDP port {port} at 127.0.0.1, where node 0 listens, is taken"):
            head.start()
        head.leave(0)


def test_node_0_names_the_nodes_that_never_came():
    table = after(beat(2))
    assert table.missing(["a", "b", "c", "d"]) == ["node 1 (b)", "node 3 (d)"]
    assert table.missing([""] * 2) == ["node 1"]


def test_the_exit_code_of_node_0_is_kept():
    table = after(beat(1, code=1))
    assert table.head_code is None
    table.receive(beat(0, code=2))
    assert table.head_code == 2
