"""Ranks encode their parts of the manifest, and rank 0 joins them: in small steps, with the same result."""

import json
from dataclasses import replace
from typing import Any

import pytest

from train.checkpoint.format import manifest as module
from train.checkpoint.format.manifest import Manifest, Piece, ShardFile, by_tensor, decode, describe, encode, join
from train.errors import CheckpointError

RANKS = 6


def shard(rank: int, tensors: int = 3, rows: int = 4) -> tuple[ShardFile, list[Piece]]:
    size = 8 * rows
    file = ShardFile(f"shard-{rank:05d}.safetensors", 4096 + size * tensors, 4096, f"{rank:016x}")
    pieces = [
        Piece(f"model.{t}", "F32", (4 * RANKS, 2), (4 * rank, 0), (rows, 2), file.name, 4096 + size * t, (f"{t:016x}",))
        for t in range(tensors)
    ]
    return file, pieces


def facts(shards: list[tuple[ShardFile, list[Piece]]], **changes: Any) -> Manifest:
    pieces = by_tensor(piece for _, pieces in shards for piece in pieces)
    states = [{"rank": rank, "read": [rank] * 50} for rank in range(len(shards))]
    files = [file for file, _ in shards]
    known = {"files": files, "pieces": pieces, "rank_states": states, "recipe": {"name": "a"}} | changes
    return Manifest(7, 700, None, {}, {"model": {}}, {}, versions={}, saved_at="now", **known)


def test_the_joined_parts_are_the_manifest() -> None:
    shards = [shard(rank) for rank in range(RANKS)]
    shards[2] = shard(2, rows=8)
    shards[3] = shard(3, tensors=0)  # a rank that had nothing to save
    file, pieces = shards[0]  # a tensor that the other ranks lack
    alone = Piece("model.alone", "F32", (1, 2), (0, 0), (1, 2), file.name, file.bytes, ("0" * 16,))
    shards[0] = replace(file, bytes=file.bytes + alone.bytes), [*pieces, alone]
    whole = facts(shards)
    described = [describe(file, number, pieces) for number, (file, pieces) in enumerate(shards)]
    joined = bytes(join(facts(shards, files=[], pieces={}), described))
    assert decode(joined) == whole
    assert joined == encode(whole)
    assert sum(one.tensor_bytes for one in described) == whole.tensor_bytes


@pytest.mark.parametrize("ranks", [8, 64])
def test_no_call_of_the_encoder_grows_with_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """The encoder holds Python's lock for a whole call, and training waits for it meanwhile."""
    described = [describe(*(file, rank, pieces)) for rank in range(ranks) for file, pieces in [shard(rank)]]
    known, lengths, dumps = facts([shard(rank) for rank in range(ranks)], files=[], pieces={}), list[int](), json.dumps

    def measured(*arguments: Any, **options: Any) -> str:
        text = dumps(*arguments, **options)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(module.json, "dumps", measured)
    assert len(json.loads(bytes(join(known, described)))["files"]) == ranks
    assert len(lengths) > 2 * ranks
    assert max(lengths) < 300


def test_a_manifest_that_no_one_could_read_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    described = [describe(file, rank, pieces) for rank in range(RANKS) for file, pieces in [shard(rank)]]
    known = facts([shard(rank) for rank in range(RANKS)], files=[], pieces={})
    monkeypatch.setattr(module, "METADATA_BYTES", len(join(known, described)))
    join(known, described)
    monkeypatch.setattr(module, "METADATA_BYTES", len(join(known, described)) - 1)
    with pytest.raises(
        CheckpointError, match=r"manifest.json would have .* of 6 ranks, .*set parallel.replicate above 1"
    ):
        join(known, described)
