"""What a node knows about the others from their heartbeats. Does no input or output."""

from collections.abc import Sequence

from launch.supervise.datagrams import REPORTED, Message, Silence
from train.exit_codes import FINISHED, STOPPED

ROUND_SECONDS = 1.0
LOST_ROUNDS = 20
"""Rounds without a heartbeat after which a node is lost. A network that recovers earlier costs nothing."""
SOON_ROUNDS = 5
"""The same limit when the run was asked to stop, or when the node reported that it failed."""


class PeerTable:
    """Rounds since each node's last heartbeat, and failures, by node number."""

    def __init__(self) -> None:
        self._hosts: dict[int, str] = {}
        """Host name of each node that was heard of."""
        self._seen: set[int] = set()
        """Nodes that sent a heartbeat to this one."""
        self._silent: dict[int, int] = {}
        """Rounds since the last heartbeat of each node that is expected to send more."""
        self._failed: set[int] = set()
        self._codes: dict[int, int] = {}
        """Exit code of each node that has left."""

    @property
    def head_code(self) -> int | None:
        """The exit code of node 0; None while it has not left."""
        return self._codes.get(0)

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the nodes other than 0 that never sent a heartbeat.

        `names`: the host names of all nodes, "" if not known."""
        absent = ((node, name) for node, name in enumerate(names) if node and node not in self._seen)
        return [f"node {node}" + (f" ({name})" if name else "") for node, name in absent]

    def receive(self, message: Message) -> None:
        """Take a message of another node. A node that leaves adds its exit code, the head adds its report."""
        node, code = message.node, message.code
        self._seen.add(node)
        self._hosts[node] = message.host
        if node == 0:
            self._silent = {one.node: one.rounds for one in message.silent}
            self._failed = {one.node for one in message.silent if one.failed}
            self._hosts |= {one.node: one.host for one in message.silent}
        if code is not None:
            self._codes[node] = code
        if code is None:
            self._silent[node] = 0
            self._failed.discard(node)
        elif code in (FINISHED, STOPPED):
            self._silent.pop(node, None)  # it is done, so no more heartbeats are expected
        else:
            self._silent.setdefault(node, 0)
            self._failed.add(node)

    def next_round(self) -> None:
        """Count one more round without a heartbeat for every node."""
        for node in self._silent:
            self._silent[node] += 1

    def report(self) -> tuple[Silence, ...]:
        """Return what the head sends to the others: the nodes that missed rounds, the longest silent ones first."""
        missed = sorted(self._silent.items(), key=lambda item: -item[1])
        return tuple(
            Silence(node, self._hosts[node], rounds, node in self._failed)
            for node, rounds in missed[:REPORTED]
            if rounds > 1
        )

    def lost(self, hurry: bool) -> str | None:
        """Return the name of a lost node and the reason, or None. `hurry` applies SOON_ROUNDS to all nodes."""
        for node, rounds in self._silent.items():
            if rounds > (SOON_ROUNDS if hurry or node in self._failed else LOST_ROUNDS):
                reason = "failed" if node in self._failed else f"has not answered for {rounds * ROUND_SECONDS:.0f} s"
                return f"node {node} ({self._hosts[node]}) {reason}"
        return None
