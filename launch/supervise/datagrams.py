"""The datagrams of the heartbeats: small, sealed with the job's secret, and parsed strictly.

Anybody can send bytes to a UDP port. `decode` therefore returns either a message in which every field has its type and
range, or None. It never raises.
"""

import json
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.supervise.secret import seal, unseal

MAX_BYTES = 16_384
"""Longest datagram. A report on REPORTED nodes is shorter."""
REPORTED = 100
"""Nodes that one report names at most."""
HOST_CHARACTERS = 64
COUNT = 2**53
_HOST = re.compile(rf"[A-Za-z0-9._?-]{{1,{HOST_CHARACTERS}}}")
_SESSION = re.compile(r"[0-9a-f]{32}|")


@dataclass(frozen=True)
class Silence:
    """What the head reports about a node that missed heartbeats."""

    node: int
    host: str
    rounds: int
    """Rounds since its last heartbeat."""
    failed: bool
    """Whether it left with the exit code of a failure."""


@dataclass(frozen=True)
class Message:
    """One datagram from a node."""

    node: int
    host: str
    session: str
    """Random name of the sending process."""
    to: str
    """Session of the receiver; "" while the sender does not know it."""
    count: int
    """Number of the message, which increases within a session."""
    code: int | None = None
    """Exit code of the node, if it leaves."""
    silent: tuple[Silence, ...] = ()


def own_host() -> str:
    """Return the name of this machine, with only the characters that a message may hold."""
    return re.sub(r"[^A-Za-z0-9._-]", "?", socket.gethostname())[:HOST_CHARACTERS] or "?"


def encode(message: Message, secret: bytes, run: str) -> bytes:
    """Return the datagram of a message."""
    silent = [[one.node, one.host, one.rounds, one.failed] for one in message.silent]
    fields = [message.node, message.host, message.session, message.to, message.count, message.code, silent]
    return seal(secret, f"heartbeat {run}", json.dumps(fields, separators=(",", ":")).encode())


def decode(datagram: bytes, secret: bytes, run: str, nodes: int) -> Message | None:
    """Return the message of a datagram, or None if it is none from a node of this run."""
    text = unseal(secret, f"heartbeat {run}", datagram)
    if text is None or len(datagram) > MAX_BYTES:
        return None
    try:
        node, host, session, to, count, code, silent = json.loads(text)
        return Message(
            _number(node, nodes),
            _word(host, _HOST),
            _word(session, _SESSION),
            _word(to, _SESSION),
            _number(count, COUNT),
            None if code is None else _number(code, 256),
            _silences(silent, nodes),
        )
    except (ValueError, TypeError, RecursionError):
        return None


def _silences(items: Any, nodes: int) -> tuple[Silence, ...]:
    if not isinstance(items, list) or len(items) > REPORTED:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError
    return tuple(_silence(item, nodes) for item in items)  # pyright: ignore[reportUnknownVariableType]


def _silence(item: Sequence[Any], nodes: int) -> Silence:
    node, host, rounds, failed = item
    if not isinstance(failed, bool):
        raise ValueError
    return Silence(_number(node, nodes), _word(host, _HOST), _number(rounds, COUNT), failed)


def _number(value: Any, end: int) -> int:
    """Return an integer from 0 to below `end`. ValueError for anything else."""
    if type(value) is not int or not 0 <= value < end:
        raise ValueError
    return value


def _word(value: Any, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError
    return value
