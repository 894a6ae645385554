"""DCP's own functions write and read the safetensors shards, and any cut of a tensor can be read by any other."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from parallel.fragments import FlatFragment
from train.checkpoint import shard_reader, shard_writer
from train.checkpoint.format import manifest as checkpoint_format
from train.checkpoint.format import verify
from train.checkpoint.format.manifest import Manifest, Piece, ShardFile, by_tensor, decode, encode
from train.checkpoint.format.reader import Reader
from train.checkpoint.shard_reader import ShardReader
from train.checkpoint.shard_writer import ShardWriter, piece_of, write_shard
from train.checkpoint.stores.local import LocalFolder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def manifest_of(files: list[ShardFile], pieces: list[Piece]) -> Manifest:
    return Manifest(1, 2, None, {}, {}, {}, [], {}, "", files, by_tensor(pieces))


def write(folder: Path, state: dict[str, torch.Tensor]) -> Manifest:
    """Write a checkpoint of one shard with dcp.save."""
    written: list[Manifest] = []
    writer = ShardWriter(LocalFolder(folder), lambda files, pieces: written.append(manifest_of(files, pieces)))
    dcp.save(state, storage_writer=writer, no_dist=True)
    LocalFolder(folder).write("manifest.json", [encode(written[0])])
    return written[0]


def read(folder: Path, manifest: Manifest, state: dict[str, torch.Tensor]) -> ShardReader:
    reader = ShardReader(LocalFolder(folder), manifest)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return reader


TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def test_every_type_and_rank_round_trips_through_dcp(tmp_path: Path) -> None:
    state = {f"t{i}": (torch.rand((3, 2, 4)[: i % 4]) * 100).to(dtype) for i, dtype in enumerate(TYPES)}
    manifest = decode(encode(write(tmp_path, state)))
    fresh = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    read(tmp_path, manifest, fresh)
    assert all(torch.equal(fresh[name], state[name]) for name in state)


def test_shards_are_plain_safetensors(tmp_path: Path) -> None:
    state = {"a": torch.randn(4, 4), "b": torch.randn(3)}
    write(tmp_path, state)
    loaded = load_file(tmp_path / "shard-00000.safetensors")
    assert np.array_equal(loaded["a"], state["a"].numpy())
    assert np.array_equal(loaded["b"], state["b"].numpy())


def test_the_numpy_reader_returns_whole_tensors_and_verifies_them(tmp_path: Path) -> None:
    weight, half = torch.randn(5, 3), torch.randn(7).bfloat16()
    manifest = write(tmp_path, {"model.w": weight, "model.h": half, "rng.00000": torch.arange(9, dtype=torch.uint8)})
    reader = Reader(tmp_path)
    assert reader.names() == ["model.h", "model.w"]
    assert np.array_equal(reader["model.w"], weight.numpy())
    assert np.array_equal(reader["model.h"], half.float().numpy())
    piece = manifest.pieces["model.w"][0]
    shard = tmp_path / piece.file
    data = bytearray(shard.read_bytes())
    data[piece.start + 1] ^= 4
    shard.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard-00000.safetensors: model.w: does not match its checksum"):
        reader["model.w"]
    assert Reader(tmp_path, verify=False)["model.w"].shape == (5, 3)


def test_a_rank_without_pieces_writes_a_shard_that_has_only_a_header(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    file, pieces = write_shard(folder, "shard-00000.safetensors", [])
    folder.write("manifest.json", [encode(manifest_of([file], pieces))])
    assert (file.bytes, pieces) == (file.header_bytes, [])
    assert verify.find_faults(folder) == []
    assert load_file(tmp_path / "shard-00000.safetensors") == {}


def test_the_manifest_is_small_compared_with_the_tensors(tmp_path: Path) -> None:
    state = {f"model.layers.{i}.w": torch.zeros(512, 512) for i in range(8)}
    write(tmp_path, state)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 1.005 * 8 * 512 * 512 * 4


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_partition_into_fragments_is_read_by_any_other(data: st.DataObject, tmp_path_factory) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    numel = math.prod(shape)
    whole = torch.arange(1, numel + 1, dtype=torch.float32)

    def cuts() -> list[tuple[int, int]]:
        inner = data.draw(st.lists(st.integers(0, numel), max_size=4))
        edges = [0, *sorted(inner), numel]
        return list(pairwise(edges))

    folder = LocalFolder(tmp_path_factory.mktemp("fragments"))
    files, pieces = [], []
    for number, (start, stop) in enumerate(cuts()):
        fragment = FlatFragment(whole[start:stop], shape, start)
        items = fragment.__create_write_items__("x", fragment)
        parts = [(piece_of(item), fragment.__get_tensor_shard__(item.index)) for item in items]
        file, placed = write_shard(folder, f"shard-{number}", parts)
        files.append(file)
        pieces += placed
    manifest = manifest_of(files, pieces)
    folder.write("manifest.json", [encode(manifest)])
    for start, stop in cuts():
        flat = torch.zeros(stop - start)
        read(folder.path, manifest, {"x": FlatFragment(flat, shape, start)})
        assert torch.equal(flat, whole[start:stop])
    assert np.array_equal(Reader(folder.path)["x"], whole.view(shape).numpy())


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 9),
    box=st.tuples(*[st.integers(0, 100)] * 4),
    block=st.integers(1, 9),
)
def test_any_box_of_a_piece_is_read_and_verified_in_blocks(rows, columns, box, block, tmp_path_factory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (checkpoint_format, shard_writer, shard_reader, verify):
            patch.setattr(module, "BLOCK_BYTES", 4 * block)
        whole = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
        folder = LocalFolder(tmp_path_factory.mktemp("boxes"))
        file, (piece,) = write_shard(
            folder, "shard", [(Piece("x", "F32", (rows, columns), (0, 0), (rows, columns)), whole)]
        )
        reader = ShardReader(folder, manifest_of([file], [piece]))
        row, column = box[0] % rows, box[1] % columns
        height, width = 1 + box[2] % (rows - row), 1 + box[3] % (columns - column)
        target = torch.zeros(height, width)
        shard_reader.PieceReader(reader, piece).read_box((row, column), (height, width), target)
        assert torch.equal(target, whole[row : row + height, column : column + width])
        span = ((height - 1) * columns + width) * 4
        assert reader.bytes_read <= span + 2 * 4 * block


def test_a_rank_reads_only_its_part_rounded_to_blocks(tmp_path: Path, monkeypatch) -> None:
    for module in (checkpoint_format, shard_writer, shard_reader, verify):
        monkeypatch.setattr(module, "BLOCK_BYTES", 4096)
    state = {"x": torch.randn(1024, 64)}
    manifest = write(tmp_path, state)
    flat = torch.zeros(1024 * 16)
    reader = read(tmp_path, manifest, {"x": FlatFragment(flat, (1024, 64), 1024 * 20 + 5)})
    assert torch.equal(flat, state["x"].view(-1)[1024 * 20 + 5 : 1024 * 36 + 5])
    assert reader.bytes_read <= flat.nbytes + 2 * 4096 + manifest.files[0].header_bytes
