"""Datagrams from strangers to the heartbeats of a run's nodes: malformed, forged, copied, and in floods."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.supervise import peers as module
from launch.supervise.datagrams import Message, decode, encode
from launch.supervise.peers import Peers
from launch.supervise.secret import seal

SECRET, RUN, NODES = b"the secret of this job", "at-29400", 3
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)
FIELDS = [1, "b", "0" * 32, "", 1, None, []]
FORGED = [
    b"",
    b"\xff" * 200,
    b"null",
    b"[" * 20_000,
    json.dumps({"run": RUN, "node": "node 1 (b)", "code": 1}).encode(),  # what earlier versions accepted
    json.dumps({"run": RUN, "node": "node x"}).encode(),
    json.dumps({"run": RUN, "node": "node 1 (b)", "silent": {"node 2": 99}, "failed": ["node 2"]}).encode(),
    encode(Message(2, "c", "0" * 32, "", 1, code=1), b"the secret of another", RUN),
    encode(Message(2, "c", "0" * 32, "", 1, code=1), b"", RUN),
    encode(Message(2, "c", "0" * 32, "", 1, code=1), SECRET, "another run"),
]


@given(JSON)
def test_a_text_of_any_form_is_a_message_or_none(value: object) -> None:
    sealed = seal(SECRET, f"heartbeat {RUN}", json.dumps(value).encode())
    assert decode(sealed, SECRET, RUN, NODES) is None


@given(st.integers(0, len(FIELDS) - 1), JSON)
def test_a_field_of_any_form_is_in_its_range_or_the_message_is_refused(place: int, value: object) -> None:
    fields = [*FIELDS[:place], value, *FIELDS[place + 1 :]]
    message = decode(seal(SECRET, f"heartbeat {RUN}", json.dumps(fields).encode()), SECRET, RUN, NODES)
    if message is not None:
        assert 0 <= message.node < NODES
        assert message.host.isprintable()
        assert len(message.host) <= 64
        assert message.code is None or 0 <= message.code < 256


@given(st.binary(max_size=300))
def test_bytes_without_the_secret_are_no_message(data: bytes) -> None:
    assert decode(data, SECRET, RUN, NODES) is None


class Relay:
    """Carries datagrams between the nodes and the head, and keeps a copy of those of the nodes, as a stranger could."""

    def __init__(self, port: int) -> None:
        self.inside, self.outside = socket.socket(type=socket.SOCK_DGRAM), socket.socket(type=socket.SOCK_DGRAM)
        self.inside.bind(("127.0.0.1", 0))
        self.outside.connect(("127.0.0.1", port))
        self.port = self.inside.getsockname()[1]
        self.copies: list[bytes] = []
        self.answers = 0
        self._node: object = None
        self._cut = threading.Event()
        for work in (self._carry_out, self._carry_back):
            threading.Thread(target=work, daemon=True).start()

    def _carry_out(self) -> None:
        while not self._cut.is_set():
            data, self._node = self.inside.recvfrom(65_536)
            self.copies.append(data)
            self._send(data)

    def _carry_back(self) -> None:
        while True:
            try:
                data = self.outside.recv(65_536)
            except ConnectionRefusedError:
                continue
            self.answers += 1
            if not self._cut.is_set():
                self.inside.sendto(data, self._node)  # pyright: ignore[reportArgumentType]

    def _send(self, data: bytes) -> None:
        try:
            self.outside.send(data)
        except ConnectionRefusedError:
            pass

    def cut(self) -> None:
        """Carry nothing more."""
        self._cut.set()

    def send_copies(self) -> None:
        """Send everything that the node ever sent to the head once more."""
        for data in list(self.copies):
            self._send(data)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Peers]]:
    """A function that starts a node; all nodes leave at the end of the test."""
    monkeypatch.setattr(module, "ROUND_SECONDS", 0.02)
    started: list[Peers] = []

    def start_node(rank: int, port: int) -> Peers:
        node = Peers(rank, "127.0.0.1", port, RUN, NODES, SECRET)
        node.start()
        started.append(node)
        return node

    yield start_node
    for node in started:
        node.leave(0)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_forged_and_malformed_datagrams_change_nothing(
    start: Callable[..., Peers], capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    head, one = start(0, port), start(1, port)
    wait_until(lambda: head.missing({}) == ["node 2"])
    with socket.socket(type=socket.SOCK_DGRAM) as stranger:
        for data in FORGED * 5:
            stranger.sendto(data, ("127.0.0.1", port))
    two = start(2, port)
    wait_until(lambda: head.missing({}) == [])  # the head still receives
    assert [node.lost(hurry=True) for node in (head, one, two)] == [None] * 3
    assert capfd.readouterr().err.count("ignored a datagram from 127.0.0.1 that is none of this job") == 1


def test_copies_of_an_earlier_run_change_nothing(start: Callable[..., Peers]) -> None:
    port = free_port()
    relay = Relay(port)
    head, two = start(0, port), start(2, relay.port)
    wait_until(lambda: head.missing({}) == ["node 1"])
    two.leave(1)
    wait_until(lambda: head.lost(hurry=False) is not None)
    head.leave(1)

    head, one = start(0, port), start(1, port)  # the same job, run and secret
    wait_until(lambda: head.missing({}) == ["node 2"])
    answers = relay.answers
    relay.send_copies()
    wait_until(lambda: relay.answers > answers)
    assert head.missing({}) == ["node 2"]
    assert (head.lost(hurry=True), one.lost(hurry=True)) == (None, None)


def test_copies_of_heartbeats_do_not_keep_a_node_alive(start: Callable[..., Peers]) -> None:
    port = free_port()
    relay = Relay(port)
    head, _ = start(0, port), start(2, relay.port)
    wait_until(lambda: head.missing({}) == ["node 1"])
    relay.cut()

    def is_lost() -> bool:
        relay.send_copies()
        return head.lost(hurry=True) is not None

    wait_until(is_lost)


def test_a_flood_is_read_in_part_and_no_node_counts_as_lost(
    start: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_DATAGRAMS", 30)
    monkeypatch.setattr(module, "DATAGRAMS_PER_NODE", 0)
    read: list[int] = []
    original = Peers._listen  # pyright: ignore[reportPrivateUsage]
    count = threading.local()

    def counting_decode(*arguments: object) -> Message | None:
        count.datagrams = getattr(count, "datagrams", 0) + 1
        return decode(*arguments)  # pyright: ignore[reportArgumentType]

    def listen(self: Peers, end: float) -> bool:
        count.datagrams = 0
        complete = original(self, end)
        if not complete:
            read.append(count.datagrams)
        return complete

    monkeypatch.setattr(module, "decode", counting_decode)
    monkeypatch.setattr(Peers, "_listen", listen)
    port = free_port()
    head, one = start(0, port), start(1, port)
    wait_until(lambda: head.missing({}) == ["node 2"])
    with socket.socket(type=socket.SOCK_DGRAM) as stranger:
        while len(read) < 40:  # rounds
            for _ in range(100):
                stranger.sendto(b"x" * 1000, ("127.0.0.1", port))
            assert head.lost(hurry=False) is None
            assert one.lost(hurry=False) is None
    assert max(read) <= 30
    start(2, port)
    wait_until(lambda: head.missing({}) == [])
