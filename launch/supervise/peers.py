"""Heartbeats between the supervisors of a run's nodes.

A rank that waits in a collective for a node without power waits forever: nothing closes its connections, and no signal
reaches it inside the collective. The supervisors therefore exchange heartbeats of their own. Once a second every node
sends the head a datagram, at the port of the rendezvous, and the head answers with its report on the others. A
supervisor that ends sends its exit code.

A node is lost only if its heartbeat was received before, so a network that drops datagrams changes nothing. Time is
counted in rounds, not in seconds, so a job that was suspended for a while loses no node.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from parallel.environ import expand_nodes
from parallel.errors import LaunchError
from train.exit_codes import FINISHED, STOPPED

ROUND_SECONDS = 1.0
LOST_ROUNDS = 20
"""Rounds without a heartbeat after which a node is lost. A network that recovers earlier costs nothing."""
SOON_ROUNDS = 5
"""The same limit when the run was asked to stop, or when the node reported that it failed."""


class PeerTable:
    """What this node knows about the others: rounds since each heartbeat, and failures. Does no input or output."""

    def __init__(self) -> None:
        self._silent: dict[str, int] = {}
        """Rounds since the last heartbeat of each node."""
        self._failed: set[str] = set()
        self._codes: dict[str, int] = {}
        """Exit code of each node that has left."""
        self._seen: set[str] = set()
        """Nodes that ever sent a heartbeat."""

    @property
    def head_code(self) -> int | None:
        """The exit code of node 0; None while it has not left."""
        return next((code for node, code in self._codes.items() if node.startswith("node 0 ")), None)

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the nodes that never sent a heartbeat. `names`: the host names of all nodes, "" if not known."""
        seen = {int(node.split()[1]) for node in self._seen}
        absent = ((number, name) for number, name in enumerate(names) if number not in seen)
        return [f"node {number}" + (f" ({name})" if name else "") for number, name in absent]

    def receive(self, message: Mapping[str, Any]) -> None:
        """Take a message from `node`. A node that leaves adds its exit `code`, the head adds its report."""
        node, code = str(message["node"]), message.get("code")
        self._seen.add(node)
        if code is not None:
            self._codes[node] = int(code)
        if "silent" in message:
            self._silent = {name: int(rounds) for name, rounds in message["silent"].items()}
            self._failed = set(message["failed"])
        if code is None:
            self._silent[node] = 0
        elif code in (FINISHED, STOPPED):
            self._silent.pop(node, None)  # it is done, so no more heartbeats are expected
        else:
            self._failed.add(node)

    def next_round(self) -> None:
        """Count one more round without a heartbeat for every node."""
        for node in self._silent:
            self._silent[node] += 1

    def report(self) -> dict[str, Any]:
        """Return what the head sends to the others: the nodes that missed rounds, as many as fit into a datagram."""
        missed = {node: rounds for node, rounds in self._silent.items() if rounds > 1}
        silent = dict(sorted(missed.items(), key=lambda item: -item[1])[:100])
        return {"silent": silent, "failed": sorted(self._failed & set(silent))}

    def lost(self, hurry: bool) -> str | None:
        """Return the name of a lost node and the reason, or None. `hurry` applies SOON_ROUNDS to all nodes."""
        for node, rounds in self._silent.items():
            if rounds > (SOON_ROUNDS if hurry or node in self._failed else LOST_ROUNDS):
                reason = "failed" if node in self._failed else f"has not answered for {rounds * ROUND_SECONDS:.0f} s"
                return f"{node} {reason}"
        return None


class Peers:
    """This node's part in the heartbeats: a thread that runs from `start` to `leave`."""

    def __init__(self, node_rank: int, head: str, port: int, run: str, nodes: int = 0) -> None:
        self._nodes = nodes
        self._is_head = node_rank == 0
        self._name = f"node {node_rank} ({socket.gethostname()})"
        self._head, self._run = (head, port), run
        self._table = PeerTable()
        self._lock = threading.Lock()
        self._addresses: set[Any] = set() if self._is_head else {self._head}
        """Where this node sends: a worker to the head, the head to every node that wrote to it."""
        self._left = threading.Event()
        self._socket = socket.socket(socket.AF_INET6 if ":" in head else socket.AF_INET, socket.SOCK_DGRAM)

    def start(self) -> None:
        """Start the thread. LaunchError if this is the head and its UDP port is taken."""
        if self._is_head:
            try:
                self._socket.bind(self._head)
            except OSError as error:
                self._socket.close()
                raise LaunchError(
                    f"UDP port {self._head[1]} at {self._head[0]}, where node 0 listens, is taken ({error.strerror}); "
                    "choose another with --head HOST:PORT on all nodes"
                ) from None
        threading.Thread(target=self._exchange, name="peers", daemon=True).start()

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
        if not self._is_head:
            return []
        names = expand_nodes(env.get("SLURM_STEP_NODELIST", ""))
        names = names if len(names) == self._nodes else [""] * self._nodes
        with self._lock:
            self._table.receive({"node": self._name})
            return self._table.missing(names)

    def leave(self, code: int) -> None:
        """Stop the thread and send this node's exit code, three times because datagrams can be lost."""
        self._left.set()
        for _ in range(3):
            self._send({"code": code}, self._addresses)

    def _exchange(self) -> None:
        with self._socket:
            while not self._left.is_set():
                if not self._is_head:
                    self._send({}, self._addresses)
                self._listen(time.monotonic() + ROUND_SECONDS)
                with self._lock:
                    self._table.next_round()

    def _listen(self, end: float) -> None:
        """Receive messages until the round ends. The head answers each of them."""
        while (left := end - time.monotonic()) > 0 and not self._left.is_set():
            self._socket.settimeout(left)
            try:
                text, sender = self._socket.recvfrom(65_536)
                message = json.loads(text)
            except (OSError, ValueError):  # the round is over, a node's port is closed, or the message is not ours
                continue
            if message.get("run") != self._run:
                continue
            with self._lock:
                self._table.receive(message)
                report = self._table.report()
            if self._is_head:
                self._addresses.add(sender)
                self._send(report, {sender})

    def _send(self, message: Mapping[str, Any], addresses: set[Any]) -> None:
        text = json.dumps({"run": self._run, "node": self._name, **message}).encode()
        for address in tuple(addresses):
            with contextlib.suppress(OSError):  # no route: treat the datagram as lost
                self._socket.sendto(text, address)
