"""A stranger who writes to the store of the rendezvous."""

import json
import pickle
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, Store
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _NodeDesc,  # pyright: ignore[reportPrivateUsage]
    _RendezvousState,  # pyright: ignore[reportPrivateUsage]
)

from launch.supervise.rendezvous import SealedState, decode, encode
from launch.supervise.secret import seal

SECRET, RUN = b"the secret of this job", "at-29400"
KEY, PURPOSE = f"rendezvous/{RUN}", f"rendezvous {RUN}"


class TouchOnRead:
    """Its pickle creates a file when it is read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


def state(number: int) -> Any:
    made = _RendezvousState()
    node, other = _NodeDesc("10.0.0.1", 17, 0), _NodeDesc("fd00::7", 18, 1)
    made.round, made.complete, made.deadline = number, True, datetime.now(UTC)
    made.participants, made.last_heartbeats = {node: 0, other: 1}, {node: datetime.now(UTC)}
    made.wait_list, made.redundancy_list = {other}, {node}
    return made


def test_a_state_keeps_all_its_fields() -> None:
    one = state(3)
    assert vars(decode(encode(one))) == vars(one)


def write(store: Store, content: bytes) -> None:
    store.set(KEY, content)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("sealed_by", [None, b"", b"the secret of another job"])
def test_a_pickle_in_the_store_is_not_read_and_the_next_write_replaces_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], sealed_by: bytes | None
) -> None:
    store = HashStore()
    head = SealedState(store, RUN, SECRET)
    first = head.set_state(pickle.dumps(state(1)))
    assert first is not None
    assert first[2]
    evil = pickle.dumps(TouchOnRead(tmp_path / "mark"))
    write(store, evil if sealed_by is None else seal(sealed_by, PURPOSE, evil))
    assert head.get_state() == head.get_state()
    found = head.get_state()
    assert found is not None
    assert pickle.loads(found[0]).round == 1
    assert not (tmp_path / "mark").exists()
    assert capfd.readouterr().err.count("ignored a state of the rendezvous that no node of this job wrote") == 1
    replaced = head.set_state(pickle.dumps(state(2)), found[1])
    assert replaced is not None
    assert replaced[2]
    assert pickle.loads(SealedState(store, RUN, SECRET).get_state()[0]).round == 2  # pyright: ignore[reportOptionalSubscript]


def test_a_node_without_the_secret_cannot_write_a_state() -> None:
    store = HashStore()
    SealedState(store, RUN, b"").set_state(pickle.dumps(state(7)))
    found = SealedState(store, RUN, SECRET).get_state()
    assert found is not None
    assert pickle.loads(found[0]).round == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@given(st.sampled_from(sorted(json.loads(encode(state(1))))), JSON)
def test_a_field_of_any_form_is_accepted_or_refused_without_an_error(name: str, value: Any) -> None:
    fields = json.loads(encode(state(1)))
    fields[name] = value
    found = decode(json.dumps(fields).encode())
    assert found is None or isinstance(found, _RendezvousState)


@pytest.mark.parametrize("text", [b"", b"{}", b"null", b"[" * 100_000, b"\xff", pickle.dumps({"round": 1})])
def test_a_text_that_is_no_state_is_refused(text: bytes) -> None:
    assert decode(text) is None
