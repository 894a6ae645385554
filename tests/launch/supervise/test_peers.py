"""Who is lost, and real datagrams between nodes."""

import socket
import time

import pytest

from launch.supervise.peers import LOST_ROUNDS, SOON_ROUNDS, Hearing, Peers
from parallel.errors import LaunchError


def heard(*messages: dict) -> Hearing:
    hearing = Hearing()
    for message in messages:
        hearing.hear(message)
    return hearing


def wait(hearing: Hearing, rounds: int) -> Hearing:
    for _ in range(rounds):
        hearing.next_round()
    return hearing


def test_a_silent_node_is_lost_after_a_while_and_sooner_when_there_is_no_time():
    hearing = wait(heard({"node": "node 1 (b)"}), SOON_ROUNDS)
    assert hearing.lost(hurry=True) is None
    wait(hearing, 1)
    assert hearing.lost(hurry=False) is None
    assert hearing.lost(hurry=True) == "node 1 (b) has not answered for 6 s"
    wait(hearing, LOST_ROUNDS)
    assert hearing.lost(hurry=False) == "node 1 (b) has not answered for 26 s"
    hearing.hear({"node": "node 1 (b)"})
    assert hearing.lost(hurry=True) is None


@pytest.mark.parametrize(("code", "lost"), [(0, None), (75, None), (1, "b failed"), (2, "b failed")])
def test_a_node_that_leaves_is_missed_only_if_it_failed(code, lost):
    hearing = wait(heard({"node": "b"}, {"node": "b", "code": code}), SOON_ROUNDS + 1)
    assert hearing.lost(hurry=False) == lost


def test_a_node_that_was_never_heard_is_not_missed():
    assert wait(Hearing(), LOST_ROUNDS + 1).lost(hurry=True) is None


def test_nodes_learn_from_the_head_whom_it_misses():
    head = wait(heard({"node": "b"}, {"node": "c"}), 4)
    head.hear({"node": "b"})
    worker = heard({"node": "a", **head.report()})
    assert wait(worker, 2).lost(hurry=True) == "c has not answered for 6 s"
    worker.hear({"node": "a", **heard({"node": "b"}, {"node": "c"}).report()})
    assert wait(worker, 3).lost(hurry=True) is None


def test_nodes_hear_each_other_and_the_news_of_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("launch.supervise.peers.ROUND_SECONDS", 0.02)
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [Peers(rank, "127.0.0.1", port, "job1.0") for rank in range(3)]
    try:
        for node in nodes:
            node.start()
        time.sleep(1)
        assert [node.lost(hurry=True) for node in nodes] == [None] * 3
        nodes[1].leave(1)
        deadline = time.monotonic() + 10
        while not (nodes[0].lost(hurry=False) and nodes[2].lost(hurry=False)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert nodes[2].lost(hurry=False) == f"node 1 ({socket.gethostname()}) failed"
    finally:
        for node in nodes:
            node.leave(0)


def test_a_taken_port_is_named():
    with socket.socket(type=socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        head = Peers(0, "127.0.0.1", port, "job1.0")
        with pytest.raises(LaunchError, match=f"UDP port {port} at 127.0.0.1, where node 0 listens, is taken"):
            head.start()
        head.leave(0)
