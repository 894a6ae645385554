"""The format of a shard: rows of tokens in blocks, the origins of the rows in other blocks, a checksum for each block.

    header    64 bytes, see _HEADER
    data      blocks of `block_rows` rows. A row is its number of tokens in use (uint32) and `row_tokens` tokens
    origins   for each data block: the first piece of each row (uint32, rows + 1), then the pieces (see PIECE)
    index     uint64 arrays: data offsets (blocks + 1), data checksums, origin offsets (blocks + 1), origin checksums

Everything is little-endian. Checksums are 64-bit xxh3 over the bytes as stored. With compression "zstd" each block is
one frame. Training reads only the data blocks: a piece of a document ends with the end-of-document token, with the row,
or with the used part of the row, so boundaries are not stored there.
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

from data_pipeline.atomic_file import open_atomic
from data_pipeline.errors import DataError

Compression = Literal["none", "zstd"]
Rows = NDArray[np.uint16] | NDArray[np.uint32]
"""Rows of tokens."""
RowNumbers = NDArray[np.int64]

PIECE = np.dtype([("start", "<u4"), ("file", "<u4"), ("document", "<u8"), ("offset", "<u8")])
"""A piece of a document in a row: its first position in the row, the input file, the document's number in that file,
and the document's first token in the piece."""

_MAGIC = b"KEEPSTEP"
_VERSION = 1
_HEADER = struct.Struct("<8sIIIIIQ28x")  # magic, version, bytes per token, row_tokens, block_rows, compressed, rows
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True)
class ShardShape:
    """The layout of a shard."""

    rows: int
    row_tokens: int
    """Tokens per row."""
    block_rows: int
    """Rows per block; the last block may have fewer."""
    token_bytes: int
    """Bytes per token: 2 or 4."""
    compression: Compression = "none"

    @property
    def dtype(self) -> np.dtype:
        """Type of a token."""
        return np.dtype("<u2") if self.token_bytes == 2 else np.dtype("<u4")

    @property
    def prefix(self) -> int:
        """Items (of the tokens' type) before a row's tokens. They store the number of tokens in use."""
        return 4 // self.token_bytes

    @property
    def row_items(self) -> int:
        """Items (of the tokens' type) in a stored row."""
        return self.prefix + self.row_tokens

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.rows // self.block_rows)

    @property
    def index_bytes(self) -> int:
        """Size of the index in bytes."""
        return (4 * self.blocks + 2) * 8

    def rows_of_block(self, block: int) -> int:
        """Number of rows in the block."""
        return min(self.block_rows, self.rows - block * self.block_rows)


@dataclass(frozen=True)
class ShardIndex:
    """Where the blocks of a shard begin, in bytes, and their checksums. Offsets have one more entry: the end."""

    data_offsets: NDArray[np.uint64]
    data_sums: NDArray[np.uint64]
    origin_offsets: NDArray[np.uint64]
    origin_sums: NDArray[np.uint64]


@dataclass(frozen=True)
class Block:
    """A block to write: its rows and their pieces."""

    rows: Rows
    """Rows as stored. Shape (rows, row_items)."""
    piece_start: NDArray[np.uint32]
    """First piece of each row, and the number of pieces. Shape (rows + 1,)."""
    pieces: NDArray[np.void]
    """The pieces (PIECE) of all rows, in order."""


def write_shard(path: Path, shape: ShardShape, blocks: Iterator[Block]) -> str:
    """Writes the shard; it gets its name once it is complete. Returns the checksum of the header and the index.

    The index has the checksums of all blocks, so this checksum covers every byte."""
    compress = zstandard.ZstdCompressor(level=3).compress if shape.compression == "zstd" else bytes
    origins: list[bytes] = []
    data_sums, data_offsets = [], [HEADER_BYTES]
    with open_atomic(path) as file:
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
    """The shard's first HEADER_BYTES bytes."""
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
    """The layout that a shard's first bytes state. DataError if they are not a shard of this version."""
    if len(data) < HEADER_BYTES or not data.startswith(_MAGIC):
        raise DataError(f"{name} is not a shard: it does not begin with {_MAGIC.decode()}")
    _, version, token_bytes, row_tokens, block_rows, compressed, rows = _HEADER.unpack(data[:HEADER_BYTES])
    if version != _VERSION:
        raise DataError(f"{name} has shard version {version}; this Keepstep reads {_VERSION}: build the data set again")
    return ShardShape(rows, row_tokens, block_rows, token_bytes, "zstd" if compressed else "none")


def read_index(data: bytes, shape: ShardShape, shard_bytes: int, name: str) -> ShardIndex:
    """The index from the last bytes of a shard of `shard_bytes`.

    DataError unless the blocks follow each other from the header to the index."""
    ends = np.cumsum([shape.blocks + 1, shape.blocks, shape.blocks + 1])
    index = ShardIndex(*np.split(np.frombuffer(data, "<u8"), ends))
    offsets = np.concatenate([index.data_offsets, index.origin_offsets])
    last = shard_bytes - shape.index_bytes
    in_order = bool((offsets[1:] >= offsets[:-1]).all()) and index.data_offsets[-1] == index.origin_offsets[0]
    if not in_order or int(offsets[0]) != HEADER_BYTES or int(offsets[-1]) != last:
        raise DataError(f"the index of {name} has blocks that do not follow each other from its header to its index")
    return index


def index_checksum(header_bytes: bytes, index_bytes: bytes) -> str:
    """The checksum that the manifest stores for a shard."""
    return xxhash.xxh3_64_hexdigest(header_bytes + index_bytes)


def decode_rows(stored: bytes | memoryview, shape: ShardShape, block: int) -> Rows:
    """The rows of a stored block, read-only. Shape (rows of the block, row_items). DataError if the size is wrong."""
    rows = shape.rows_of_block(block)
    size = rows * shape.row_items * shape.token_bytes
    plain = _decompress(stored, shape, size)
    if len(plain) != size:
        raise DataError(f"the block has {len(plain)} bytes instead of {size}")
    return np.frombuffer(plain, shape.dtype).reshape(rows, shape.row_items)


def problem_of_rows(rows: Rows, shape: ShardShape, vocab_size: int) -> str | None:
    """What is wrong with the numbers in the rows of a block, or None."""
    largest = int(rows[:, shape.prefix :].max())
    if largest >= vocab_size:
        return f"token id {largest} is not in the vocabulary of {vocab_size} tokens"
    used = int(np.ascontiguousarray(rows[:, : shape.prefix]).view("<u4").max())
    if used > shape.row_tokens:
        return f"a row of {shape.row_tokens} tokens has {used} in use"
    return None


def decode_origins(stored: bytes, shape: ShardShape, block: int) -> tuple[NDArray[np.uint32], NDArray[np.void]]:
    """The first piece of each row, shape (rows of the block + 1,), and the pieces (PIECE).

    DataError if they cannot be the origins of these rows."""
    rows = shape.rows_of_block(block)
    starts_bytes = 4 * (rows + 1)
    plain = _decompress(stored, shape, starts_bytes + rows * shape.row_tokens * PIECE.itemsize)
    if len(plain) < starts_bytes or (len(plain) - starts_bytes) % PIECE.itemsize:
        raise DataError(f"the origins of block {block} have {len(plain)} bytes, which are no whole pieces")
    starts, pieces = np.frombuffer(plain[:starts_bytes], "<u4"), np.frombuffer(plain[starts_bytes:], PIECE)
    in_order = starts[0] == 0 and starts[-1] == len(pieces) and bool((starts[1:] >= starts[:-1]).all())
    if not in_order or (len(pieces) and int(pieces["start"].max()) >= shape.row_tokens):
        raise DataError(f"the origins of block {block} are not those of its {rows} rows")
    return starts, pieces


def _decompress(stored: bytes | memoryview, shape: ShardShape, limit: int) -> bytes | memoryview:
    """The bytes of a block. DataError if they are damaged or more than `limit`, which is checked before memory is
    allocated."""
    if shape.compression == "none":
        return stored
    try:
        if (size := zstandard.frame_content_size(stored)) > limit:
            raise DataError(f"the block has {size} bytes decompressed, more than {limit}")
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=limit)
    except zstandard.ZstdError as error:
        raise DataError(f"the block cannot be decompressed: {error}") from None
