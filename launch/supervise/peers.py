"""Heartbeats between the supervisors of a run's nodes.

A rank that waits in a collective for a node without power waits forever: nothing closes its connections, and no signal
reaches it inside the collective. The supervisors therefore exchange heartbeats of their own. Once a second every node
sends the head a datagram, at the port of the rendezvous, and the head sends every node its report on the others. A
supervisor that ends sends its exit code.

A node is lost only if its heartbeat was received before, so a network that drops datagrams changes nothing. Time is
counted in rounds, not in seconds, so a job that was suspended for a while loses no node.

Strangers can write to the port too. Each datagram has the HMAC of the job's secret (`launch/supervise/secret.py`).
Sender and receiver are processes with random names (sessions), and the datagrams of a session are numbered, so a copy
of a datagram counts for nothing. To a datagram that does not name its session the head only answers with it. Each
round reads a bounded number of datagrams. In a round with more, heartbeats may have been dropped, so it counts as no
silence.
"""

import contextlib
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, cast

from launch.supervise.datagrams import MAX_BYTES, Message, Silence, decode, encode, own_host
from launch.supervise.peer_table import ROUND_SECONDS, PeerTable
from launch.supervise.secret import VARIABLE
from parallel.environ import expand_nodes
from parallel.errors import LaunchError

LEAST_DATAGRAMS, DATAGRAMS_PER_NODE = 1000, 20
"""Datagrams that a round reads at most: the sum of the first, and of the second for each node."""
SESSIONS_PER_NODE = 64
"""Processes of one node, one after the other, whose heartbeats one head accepts."""


class Peers:
    """This node's part in the heartbeats: a thread that runs from `start` to `leave`."""

    def __init__(self, node_rank: int, head: str, port: int, run: str, nodes: int, secret: bytes = b"") -> None:
        self._node, self._nodes, self._run, self._secret = node_rank, nodes, run, secret
        self._head = (head, port)
        self._session, self._count = secrets.token_hex(16), 0
        self._counts: dict[tuple[int, str], int] = {}
        """Number of the last message of each session of each node."""
        self._addresses: dict[int, tuple[Any, str]] = {} if node_rank == 0 else {0: (self._head, "")}
        """Address and session of each node to which this one sends."""
        self._table, self._lock = PeerTable(), threading.Lock()
        self._left, self._thread = threading.Event(), cast("threading.Thread | None", None)
        self._warned: set[str] = set()
        self._socket = socket.socket(socket.AF_INET6 if ":" in head else socket.AF_INET, socket.SOCK_DGRAM)

    def start(self) -> None:
        """Start the thread. LaunchError if this is the head and its UDP port is taken."""
        if self._node == 0:
            try:
                self._socket.bind(self._head)
            except OSError as error:
                self._socket.close()
                raise LaunchError(
                    f"UDP port {self._head[1]} at {self._head[0]}, where node 0 listens, is taken ({error.strerror}); "
                    "choose another with --head HOST:PORT on all nodes"
                ) from None
        self._thread = threading.Thread(target=self._exchange, name="peers", daemon=True)
        self._thread.start()

    def lost(self, hurry: bool) -> str | None:
        """Return the name of a lost node and the reason, or None; see `PeerTable.lost`."""
        with self._lock:
            return self._table.lost(hurry)

    def head_code(self, wait_seconds: float) -> int | None:
        """Return the exit code that node 0 sent when it left; None if none arrives within `wait_seconds`."""
        deadline = time.monotonic() + wait_seconds
        while True:
            with self._lock:
                code = self._table.head_code
            if code is not None or time.monotonic() > deadline:
                return code
            time.sleep(0.05)

    def missing(self, env: Mapping[str, str]) -> list[str]:
        """Return the nodes from which node 0 got no heartbeat; empty on other nodes, which do not know."""
        if self._node:
            return []
        names = expand_nodes(env.get("SLURM_STEP_NODELIST", ""))
        with self._lock:
            return self._table.missing(names if len(names) == self._nodes else [""] * self._nodes)

    def leave(self, code: int) -> None:
        """Stop the thread and send this node's exit code, three times because datagrams can be lost."""
        with self._lock:
            self._left.set()
            for _ in range(3):
                self._send_to_all(code)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread:
            self._thread.join()
        self._socket.close()

    def _exchange(self) -> None:
        while not self._left.is_set():
            if self._node:
                self._beat()
            quiet = self._listen(time.monotonic() + ROUND_SECONDS)
            with self._lock:
                if quiet:
                    self._table.next_round()
            if self._node == 0:
                self._beat()

    def _beat(self) -> None:
        with self._lock:
            if not self._left.is_set():
                self._send_to_all(None)

    def _listen(self, end: float) -> bool:
        """Receive datagrams until the round ends. Returns whether all that arrived were read."""
        for _ in range(LEAST_DATAGRAMS + DATAGRAMS_PER_NODE * self._nodes):
            left = end - time.monotonic()
            if left <= 0 or self._left.is_set():
                return True
            try:
                self._socket.settimeout(left)
                datagram, sender = self._socket.recvfrom(MAX_BYTES + 1)
            except OSError:  # the round is over, a node's port is closed, or this node leaves
                continue
            message = decode(datagram, self._secret, self._run, self._nodes)
            if self._left.is_set():
                return True
            if message is None:
                self._warn(
                    "ignored",
                    f"ignored a datagram from {sender[0]} that is none of this job; if a node is missing, check that "
                    f"{VARIABLE} is the same on all nodes",
                )
            else:
                self._receive(message, sender)
        self._warn("flood", f"a flood of datagrams at UDP port {self._head[1]}: no node counts as lost while it lasts")
        self._left.wait(max(0.0, end - time.monotonic()))
        return False

    def _receive(self, message: Message, sender: Any) -> None:
        """Take a message from another node. The head answers a greeting, and a node answers the head's first message
        at once, so that the head knows it."""
        if (message.node == 0) == (self._node == 0):
            return
        with self._lock:
            if message.to != self._session:
                if self._node == 0:
                    self._send(sender, message.session, None, ())
                return
            if not self._is_new(message):
                return
            if self._node and self._addresses[0][1] != message.session:
                self._addresses[0] = (self._head, message.session)
                self._send_to_all(None)
            elif self._node == 0:
                self._addresses[message.node] = (sender, message.session)
            self._table.receive(message)

    def _is_new(self, message: Message) -> bool:
        """Whether the message is no copy of an earlier one. Remembers its number."""
        key = (message.node, message.session)
        if key not in self._counts and len(self._counts) >= SESSIONS_PER_NODE * self._nodes:
            return False
        if message.count <= self._counts.get(key, 0):
            return False
        self._counts[key] = message.count
        return True

    def _send_to_all(self, code: int | None) -> None:
        report = self._table.report() if self._node == 0 else ()
        for address, session in self._addresses.values():
            self._send(address, session, code, report)

    def _send(self, address: Any, to: str, code: int | None, silent: tuple[Silence, ...]) -> None:
        self._count += 1
        message = Message(self._node, own_host(), self._session, to, self._count, code, silent)
        with contextlib.suppress(OSError):  # no route: treat the datagram as lost
            if self._node:
                self._socket.connect(address)  # the kernel then drops what any other address sends
                self._socket.send(encode(message, self._secret, self._run))
            else:
                self._socket.sendto(encode(message, self._secret, self._run), address)

    def _warn(self, kind: str, text: str) -> None:
        """Print a warning, each kind once: a stranger could fill the log."""
        if kind not in self._warned:
            self._warned.add(kind)
            print(f"keepstep: {text}", file=sys.stderr, flush=True)
