"""Do the launchers of a run's nodes still hear each other?

Ranks that wait in a collective for a node without power wait on: nothing closes their connections, and no signal
reaches a rank that waits inside a collective. So the supervisors talk beside them. Once a second every node sends the
head a datagram, at the port where the nodes meet, and the head answers with what it knows of the others. Whoever ends
says so, with its exit code.

A node counts as lost only if it was heard before, so where datagrams are filtered nothing changes. Rounds are counted,
not seconds, so a job that was suspended for a while loses nobody.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from parallel.errors import LaunchError
from train.exit_codes import FINISHED, STOPPED

ROUND_SECONDS = 1.0
LOST_ROUNDS = 20
"""A node that is silent for so long is lost. A cut network that is mended before costs nothing."""
SOON_ROUNDS = 5
"""The same when there is no time to wait, as the run was asked to stop, or when the node said that it failed."""


class Hearing:
    """Who was heard, and for how many rounds not any more. Pure: messages and rounds in."""

    def __init__(self) -> None:
        self._silent: dict[str, int] = {}
        self._failed: set[str] = set()

    def hear(self, message: Mapping[str, Any]) -> None:
        """`node`: who speaks; `code`: its exit code as it leaves; the head adds what it knows of the others."""
        node, code = str(message["node"]), message.get("code")
        if "silent" in message:
            self._silent = {name: int(rounds) for name, rounds in message["silent"].items()}
            self._failed = set(message["failed"])
        if code is None:
            self._silent[node] = 0
        elif code in (FINISHED, STOPPED):
            self._silent.pop(node, None)  # it is done, and won't be missed
        else:
            self._failed.add(node)

    def next_round(self) -> None:
        for node in self._silent:
            self._silent[node] += 1

    def report(self) -> dict[str, Any]:
        """Of the head's knowledge what the others lack: nodes that miss rounds, as many as a datagram takes."""
        missed = {node: rounds for node, rounds in self._silent.items() if rounds > 1}
        silent = dict(sorted(missed.items(), key=lambda item: -item[1])[:100])
        return {"silent": silent, "failed": sorted(self._failed & set(silent))}

    def lost(self, hurry: bool) -> str | None:
        """Who is lost and how that shows."""
        for node, rounds in self._silent.items():
            if rounds > (SOON_ROUNDS if hurry or node in self._failed else LOST_ROUNDS):
                how = "failed" if node in self._failed else f"has not answered for {rounds * ROUND_SECONDS:.0f} s"
                return f"{node} {how}"
        return None


class Peers:
    """This node's part of the talk, in a thread from `start` to `leave`."""

    def __init__(self, node_rank: int, head: str, port: int, run: str) -> None:
        self._is_head = node_rank == 0
        self._name = f"node {node_rank} ({socket.gethostname()})"
        self._head, self._run = (head, port), run
        self._hearing = Hearing()
        self._lock = threading.Lock()
        self._others: set[Any] = set() if self._is_head else {self._head}
        self._left = threading.Event()
        self._socket = socket.socket(socket.AF_INET6 if ":" in head else socket.AF_INET, socket.SOCK_DGRAM)

    def start(self) -> None:
        if self._is_head:
            try:
                self._socket.bind(self._head)
            except OSError as error:
                self._socket.close()
                raise LaunchError(
                    f"UDP port {self._head[1]} at {self._head[0]}, where node 0 listens, is taken ({error.strerror}); "
                    "choose another with --head HOST:PORT on all nodes"
                ) from None
        threading.Thread(target=self._talk, name="peers", daemon=True).start()

    def lost(self, hurry: bool) -> str | None:
        with self._lock:
            return self._hearing.lost(hurry)

    def leave(self, code: int) -> None:
        """The last word, said more than once since datagrams may get lost."""
        self._left.set()
        for _ in range(3):
            self._say({"code": code}, self._others)

    def _talk(self) -> None:
        with self._socket:
            while not self._left.is_set():
                if not self._is_head:
                    self._say({}, self._others)
                self._listen(time.monotonic() + ROUND_SECONDS)
                with self._lock:
                    self._hearing.next_round()

    def _listen(self, end: float) -> None:
        """For one round. The head answers everybody."""
        while (left := end - time.monotonic()) > 0 and not self._left.is_set():
            self._socket.settimeout(left)
            try:
                text, sender = self._socket.recvfrom(65_536)
                message = json.loads(text)
            except (OSError, ValueError):  # nothing came, a node's port is closed, or it isn't meant for us
                continue
            if message.get("run") != self._run:
                continue
            with self._lock:
                self._hearing.hear(message)
                report = self._hearing.report()
            if self._is_head:
                self._others.add(sender)
                self._say(report, {sender})

    def _say(self, words: Mapping[str, Any], to: set[Any]) -> None:
        text = json.dumps({"run": self._run, "node": self._name, **words}).encode()
        for address in tuple(to):
            with contextlib.suppress(OSError):  # no way there: as good as lost on the way
                self._socket.sendto(text, address)
