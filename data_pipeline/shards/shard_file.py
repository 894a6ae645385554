"""One shard file: rows of tokens in blocks, what each row holds in blocks beside them, and a checksum for each block.

    header    64 bytes, see _HEADER
    data      blocks of `block_rows` rows. A row is its number of tokens in use (uint32) and `row_tokens` tokens
    origins   for each block: where the pieces of each row begin (uint32, rows + 1), then the pieces (see PIECE)
    index     uint64 arrays: data offsets (blocks + 1), data checksums, origin offsets (blocks + 1), origin checksums

Everything is little-endian; checksums are xxh3 of 64 bits over the bytes as stored. With compression "zstd" each block
is one frame. Training reads the data blocks alone. A piece of a document in a row ends with the end-of-document token,
with the row, or where the row's used part ends; so boundaries need no list of their own.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.whole_file import open_whole

Compression = Literal["none", "zstd"]
Rows = NDArray[np.uint16] | NDArray[np.uint32]

PIECE = np.dtype([("start", "<u4"), ("file", "<u4"), ("document", "<u8"), ("offset", "<u8")])
"""A document's piece in a row: first position in the row, input file, number in that file, its first token there."""

_MAGIC = b"KEEPSTEP"
_VERSION = 1
_HEADER = struct.Struct("<8sIIIIIQ28x")  # magic, version, bytes per token, row_tokens, block_rows, compressed, rows
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True)
class ShardShape:
    """All that fixes a shard's layout."""

    rows: int
    row_tokens: int
    block_rows: int
    token_bytes: int
    compression: Compression = "none"

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<u2") if self.token_bytes == 2 else np.dtype("<u4")

    @property
    def prefix(self) -> int:
        """Items before a row's tokens: the number of tokens in use."""
        return 4 // self.token_bytes

    @property
    def row_items(self) -> int:
        return self.prefix + self.row_tokens

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.block_rows)

    @property
    def index_bytes(self) -> int:
        return (4 * self.blocks + 2) * 8

    def rows_of_block(self, block: int) -> int:
        return min(self.block_rows, self.rows - block * self.block_rows)


@dataclass(frozen=True)
class ShardIndex:
    data_offsets: NDArray[np.uint64]
    data_sums: NDArray[np.uint64]
    origin_offsets: NDArray[np.uint64]
    origin_sums: NDArray[np.uint64]


@dataclass(frozen=True)
class Block:
    """What the writer is given: rows as stored, and their pieces."""

    rows: Rows  # [rows, row_items]
    piece_start: NDArray[np.uint32]  # [rows + 1]
    pieces: NDArray[np.void]  # PIECE


def write_shard(path: Path, shape: ShardShape, blocks: Iterator[Block]) -> str:
    """Write under a passing name, then rename. Returns the checksum of header and index, which covers everything."""
    compress = zstandard.ZstdCompressor(level=3).compress if shape.compression == "zstd" else bytes
    origins: list[bytes] = []
    data_sums, data_offsets = [], [HEADER_BYTES]
    with open_whole(path) as file:
        file.write(header(shape))
        for block in blocks:
            data = compress(np.ascontiguousarray(block.rows).tobytes())
            file.write(data)
            data_sums.append(xxhash.xxh3_64_intdigest(data))
            data_offsets.append(data_offsets[-1] + len(data))
            origins.append(compress(block.piece_start.astype("<u4").tobytes() + block.pieces.tobytes()))
        file.writelines(origins)
        origin_offsets = np.cumsum([data_offsets[-1], *(len(origin) for origin in origins)])
        sums = [xxhash.xxh3_64_intdigest(origin) for origin in origins]
        parts = (data_offsets, data_sums, origin_offsets, sums)
        index = b"".join(np.array(part, "<u8").tobytes() for part in parts)
        file.write(index)
    return index_checksum(header(shape), index)


def header(shape: ShardShape) -> bytes:
    return _HEADER.pack(
        _MAGIC,
        _VERSION,
        shape.token_bytes,
        shape.row_tokens,
        shape.block_rows,
        int(shape.compression == "zstd"),
        shape.rows,
    )


def read_header(data: bytes, name: str) -> ShardShape:
    if len(data) < HEADER_BYTES or not data.startswith(_MAGIC):
        raise DataError(f"{name} is not a shard: it does not begin with {_MAGIC.decode()}")
    _, version, token_bytes, row_tokens, block_rows, compressed, rows = _HEADER.unpack(data[:HEADER_BYTES])
    if version != _VERSION:
        raise DataError(f"{name} has shard version {version}; this Keepstep reads {_VERSION}: build the data set again")
    return ShardShape(rows, row_tokens, block_rows, token_bytes, "zstd" if compressed else "none")


def read_index(data: bytes, shape: ShardShape) -> ShardIndex:
    ends = np.cumsum([shape.blocks + 1, shape.blocks, shape.blocks + 1])
    return ShardIndex(*np.split(np.frombuffer(data, "<u8"), ends))


def index_checksum(header_bytes: bytes, index_bytes: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(header_bytes + index_bytes)


def decode_rows(stored: bytes | memoryview, shape: ShardShape, block: int) -> Rows:
    """[rows of the block, row_items], read-only."""
    rows = shape.rows_of_block(block)
    plain = _decompress(stored, shape, rows * shape.row_items * shape.token_bytes)
    return np.frombuffer(plain, shape.dtype).reshape(rows, shape.row_items)


def decode_origins(stored: bytes, shape: ShardShape, block: int) -> tuple[NDArray[np.uint32], NDArray[np.void]]:
    """Where the pieces of each row begin, and the pieces."""
    plain = _decompress(stored, shape, None)
    head = 4 * (shape.rows_of_block(block) + 1)
    return np.frombuffer(plain[:head], "<u4"), np.frombuffer(plain[head:], PIECE)


def _decompress(stored: bytes | memoryview, shape: ShardShape, size: int | None) -> bytes | memoryview:
    if shape.compression == "none":
        return stored
    return zstandard.ZstdDecompressor().decompress(stored, max_output_size=size or 0)
