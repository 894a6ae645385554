"""The rendezvous of a run's nodes: torch's, but its state travels as sealed JSON, and on one machine nothing listens.

torch keeps the state as a pickle in a store to which anybody on the network can write, and every node unpickles what it
finds there, which can run any code. Here the store holds JSON with the HMAC of the job's secret. A state that this
secret did not seal, or that does not have the form of one, is replaced by the last good one.

Only `launch/supervise/agent.py` imports this file, because it imports torch.
"""

import json
import pickle
import sys
from datetime import datetime, timedelta
from typing import Any

from torch.distributed import DistError, HashStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,  # pyright: ignore[reportPrivateUsage]
    _RendezvousState,  # pyright: ignore[reportPrivateUsage]
    create_handler,
)

from launch.supervise.network import parse_endpoint
from launch.supervise.secret import VARIABLE, seal, unseal
from parallel.addresses import listen

NAME = "keepstep"
"""Name of this rendezvous among torchrun's (`--rdzv-backend`)."""
ANSWER_SECONDS = 60
EMPTY = b"-"
"""Content of the store before the first state."""


def create(params: RendezvousParameters, secret: bytes) -> RendezvousHandler:
    """Return the rendezvous of the nodes: in memory for one node, at the head's address for several."""
    store = HashStore() if params.max_nodes == 1 else _connect(params)
    return create_handler(store, SealedState(store, params.run_id, secret), params)


def _connect(params: RendezvousParameters) -> Store:
    host, port = parse_endpoint(params.endpoint)
    is_host = bool(params.get_as_bool("is_host"))
    timeout = timedelta(seconds=ANSWER_SECONDS)
    try:
        server = listen(host, port).detach() if is_host else None  # torch alone listens on all interfaces
        return TCPStore(host, port, is_master=is_host, timeout=timeout, master_listen_fd=server)
    except (DistError, OSError) as error:
        raise RendezvousConnectionError(str(error)) from None


class SealedState(RendezvousBackend):
    """The state of the rendezvous in a store, as JSON with the HMAC of the job's secret.

    torch hands over and expects pickles. They are made and read within this process."""

    def __init__(self, store: Store, run: str, secret: bytes) -> None:
        self._store, self._key = store, f"rendezvous/{run}"
        self._purpose, self._secret = f"rendezvous {run}", secret
        self._good = pickle.dumps(_RendezvousState())
        """The last good state."""
        self._warned = False
        self._exchange(b"", EMPTY)

    @property
    def name(self) -> str:
        """The name of this rendezvous."""
        return NAME

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and the token that stands for it; None if there is none yet."""
        found = self._call("get", self._key)
        return None if found == EMPTY else (self._opened(found), found)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state that `token` stands for. Returns the newest one, its token, and whether it is this one."""
        text = encode(pickle.loads(state))  # noqa: S301 - dumped by this process
        sealed = seal(self._secret, self._purpose, text)
        found = self._exchange(token or EMPTY, sealed)
        return None if found == EMPTY else (self._opened(found), found, found == sealed)

    def _exchange(self, expected: bytes, new: bytes) -> bytes:
        """Write `new` if the store holds `expected`. Returns what it holds then."""
        return self._call("compare_set", self._key, expected, new)

    def _call(self, operation: str, *arguments: Any) -> bytes:
        try:
            return getattr(self._store, operation)(*arguments)
        except (ValueError, RuntimeError) as error:
            raise RendezvousConnectionError(f"the store of the rendezvous does not answer: {error}") from error

    def _opened(self, sealed: bytes) -> bytes:
        """Return the pickle of a state in the store, or of the last good one. The next write replaces a bad one."""
        text = unseal(self._secret, self._purpose, sealed)
        state = None if text is None else decode(text)
        if state is not None:
            self._good = pickle.dumps(state)
        elif not self._warned:
            self._warned = True
            print(
                "keepstep: ignored a state of the rendezvous that no node of this job wrote; if nodes do not find each "
                f"other, check that {VARIABLE} is the same on all of them",
                file=sys.stderr,
                flush=True,
            )
        return self._good


def encode(state: Any) -> bytes:
    """Return a state of the rendezvous as JSON."""
    fields: dict[str, Any] = {
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "deadline": state.deadline and state.deadline.isoformat(),
        "participants": [[*_words(node), rank] for node, rank in state.participants.items()],
        "wait_list": sorted(_words(node) for node in state.wait_list),
        "redundancy_list": sorted(_words(node) for node in state.redundancy_list),
        "last_heartbeats": [[*_words(node), at.isoformat()] for node, at in state.last_heartbeats.items()],
    }
    return json.dumps(fields).encode()


def decode(text: bytes) -> Any:
    """Return the state of the rendezvous in a JSON text, or None if it has not the form of one."""
    try:
        fields = json.loads(text)
        state = _RendezvousState()
        state.round, state.complete = _typed(fields["round"], int), _typed(fields["complete"], bool)
        state.closed = _typed(fields["closed"], bool)
        state.deadline = None if fields["deadline"] is None else _moment(fields["deadline"])
        state.participants = {_node(item[:3]): _typed(item[3], int) for item in fields["participants"]}
        state.wait_list = {_node(item) for item in fields["wait_list"]}
        state.redundancy_list = {_node(item) for item in fields["redundancy_list"]}
        state.last_heartbeats = {_node(item[:3]): _moment(item[3]) for item in fields["last_heartbeats"]}
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None
    return state


def _words(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(item: Any) -> _NodeDesc:
    address, pid, number = item
    return _NodeDesc(_typed(address, str), _typed(pid, int), _typed(number, int))


def _moment(text: Any) -> datetime:
    moment = datetime.fromisoformat(_typed(text, str))
    if moment.tzinfo is None:
        raise ValueError("a time without a zone")
    return moment


def _typed(value: Any, kind: type) -> Any:
    """Return a value of exactly this type. TypeError for any other."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
