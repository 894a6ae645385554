from pathlib import Path

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards.shard_file import (
    HEADER_BYTES,
    PIECE,
    Block,
    Compression,
    ShardShape,
    decode_origins,
    decode_rows,
    header,
    index_checksum,
    read_header,
    read_index,
    write_shard,
)


def blocks_of(shape: ShardShape) -> list[Block]:
    random = np.random.default_rng(0)
    out = []
    for block in range(shape.blocks):
        rows = shape.rows_of_block(block)
        pieces = np.array([(row, 7, row + 10, 3) for row in range(rows)], PIECE)
        tokens = random.integers(0, 60_000, (rows, shape.row_items)).astype(shape.dtype)
        out.append(Block(tokens, np.arange(rows + 1, dtype=np.uint32), pieces))
    return out


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("token_bytes", [2, 4])
def test_a_written_shard_is_read_back(tmp_path: Path, token_bytes: int, compression: Compression) -> None:
    shape = ShardShape(10, 5, 4, token_bytes, compression)
    blocks = blocks_of(shape)
    checksum = write_shard(tmp_path / "one.shard", shape, iter(blocks))
    data = (tmp_path / "one.shard").read_bytes()
    assert read_header(data, "one") == shape
    assert index_checksum(header(shape), data[-shape.index_bytes :]) == checksum
    index = read_index(data[-shape.index_bytes :], shape, len(data), "one")
    assert index.data_offsets[0] == HEADER_BYTES
    for number, block in enumerate(blocks):
        begin, end = index.data_offsets[number : number + 2].tolist()
        assert np.array_equal(decode_rows(data[begin:end], shape, number), block.rows)
        begin, end = index.origin_offsets[number : number + 2].tolist()
        starts, pieces = decode_origins(data[begin:end], shape, number)
        assert np.array_equal(starts, block.piece_start)
        assert np.array_equal(pieces, block.pieces)


def test_the_header_states_the_bytes_per_token() -> None:
    assert read_header(header(ShardShape(1, 2, 3, 4)), "x").dtype == np.dtype("<u4")
    assert read_header(header(ShardShape(1, 2, 3, 2)), "x").dtype == np.dtype("<u2")


def test_another_file_is_refused() -> None:
    with pytest.raises(DataError, match=r"x is not a shard: it does not begin with KEEPSTEP"):
        read_header(b"PAR1" + bytes(100), "x")
    with pytest.raises(DataError, match=r"shard version 9; this Keepstep reads 1"):
        read_header(b"KEEPSTEP\x09" + bytes(100), "x")


def test_a_shard_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def failing():
        yield blocks_of(ShardShape(8, 5, 4, 2))[0]
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match=r"stopped"):
        write_shard(tmp_path / "one.shard", ShardShape(8, 5, 4, 2), failing())
    assert list(tmp_path.iterdir()) == []
