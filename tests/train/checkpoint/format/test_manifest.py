"""A manifest decodes to what was encoded, and every change of its bytes is detected."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.checkpoint.format.manifest import (
    DamagedError,
    Manifest,
    Piece,
    ShardFile,
    by_tensor,
    decode,
    encode,
    flat,
    shard_header,
)
from train.errors import CheckpointError

FILES = [ShardFile("shard-00000.safetensors", 4128, 4096, "00112233445566ff")]
PIECES = [
    Piece("model.w", "F32", (4, 2), (2, 0), (2, 2), FILES[0].name, 4112, ("a" * 16,)),
    Piece("model.w", "F32", (4, 2), (0, 0), (2, 2), FILES[0].name, 4096, ("b" * 16,)),
]
MANIFEST = Manifest(
    7, 700, 2.5, {"skipped": 1}, {"model": {"d": 8}}, {"shard": 2}, [{"read": 1}, {}], {"torch": "2"}, "now", FILES,
    by_tensor(PIECES),
)  # fmt: skip


def test_a_manifest_decodes_to_what_was_encoded() -> None:
    assert decode(encode(MANIFEST)) == MANIFEST
    assert [piece.offsets for piece in decode(encode(MANIFEST)).pieces["model.w"]] == [(0, 0), (2, 0)]


def test_a_manifest_is_plain_json() -> None:
    document = json.loads(encode(MANIFEST))
    assert document["step"] == 7
    assert document["tensors"]["model.w"]["pieces"][0]["sizes"] == [2, 2]


@given(st.data())
def test_every_change_of_a_manifest_is_detected(data: st.DataObject) -> None:
    encoded = bytearray(encode(MANIFEST))
    at = data.draw(st.integers(0, len(encoded) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
    if kind == "flip":
        encoded[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del encoded[at:]
    else:
        encoded.insert(at, data.draw(st.integers(0, 255)))
    with pytest.raises(DamagedError, match=r"manifest.json: the content does not match its checksum"):
        decode(bytes(encoded))


def test_another_version_is_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("train.checkpoint.format.manifest.VERSION", 2)
        newer = encode(MANIFEST)
    with pytest.raises(CheckpointError, match="version 2 with blocks of 4194304 bytes; this Keepstep reads version 1"):
        decode(newer)


def test_a_header_ends_on_a_page_and_names_boxes_by_their_ranges() -> None:
    header = shard_header(PIECES)
    assert len(header) % 4096 == 0
    entries = json.loads(header[8:])
    assert entries["model.w[2:4,0:2]"] == {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    assert entries["model.w[0:2,0:2]"]["data_offsets"] == [16, 32]


def test_nested_facts_have_dotted_names() -> None:
    assert flat({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}
