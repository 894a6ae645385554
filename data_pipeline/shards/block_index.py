"""Finds the blocks of a split in its shards."""

from collections.abc import Callable
from dataclasses import dataclass

import xxhash
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.shard_file import (
    HEADER_BYTES,
    ShardIndex,
    ShardShape,
    header,
    index_checksum,
    read_index,
)
from data_pipeline.shards.storage import Span, read_checked


@dataclass(frozen=True)
class StoredBlock:
    """Where a block is stored, and its checksum."""

    span: Span
    checksum: int
    """64-bit xxh3 of the bytes as stored."""

    def problem(self, data: bytes | memoryview) -> str | None:
        """What is wrong with the bytes, or None."""
        return None if xxhash.xxh3_64_intdigest(data) == self.checksum else "the checksum is wrong"


class BlockIndex:
    """The stored blocks of one split. A shard's index is read and verified when one of its blocks is first needed."""

    def __init__(self, dataset: DataSet, split: str) -> None:
        self._storages = dataset.storages
        self._shards = dataset.manifest.splits[split].shards
        self.shapes: list[ShardShape] = [dataset.manifest.shape(shard.rows) for shard in self._shards]
        self.blocks_per_shard = max(1, self.shapes[0].blocks if self.shapes else 1)
        self._indexes: dict[int, ShardIndex] = {}

    def locate(self, block: int) -> tuple[int, int]:
        """The shard of the block, and the block's number in that shard."""
        return divmod(block, self.blocks_per_shard)

    def file(self, shard: int) -> str:
        """The shard's path in the data set."""
        return self._shards[shard].file

    def data(self, block: int) -> StoredBlock:
        """Where the block's rows are. DataError if the shard's header or index is damaged or cannot be read."""
        index = self._index(self.locate(block)[0])
        return self._stored(block, index.data_offsets, index.data_sums)

    def origins(self, block: int) -> StoredBlock:
        """Where the origins of the block's rows are. DataError as for `data`."""
        index = self._index(self.locate(block)[0])
        return self._stored(block, index.origin_offsets, index.origin_sums)

    def _stored(self, block: int, offsets: NDArray, sums: NDArray) -> StoredBlock:
        shard, local = self.locate(block)
        begin, end = offsets[local : local + 2].tolist()
        return StoredBlock(Span(self.file(shard), begin, end), int(sums[local]))

    def _index(self, shard: int) -> ShardIndex:
        if shard not in self._indexes:
            entry, shape = self._shards[shard], self.shapes[shard]
            size = self._storages[0].size(entry.file)
            if size is not None and size > entry.bytes:
                raise DataError(
                    f"{self._storages[0].address}/{entry.file} has {size} bytes, but the manifest states "
                    f"{entry.bytes}; restore the file"
                )
            expected = header(shape)
            spans = [Span(entry.file, 0, HEADER_BYTES), Span(entry.file, entry.bytes - shape.index_bytes, entry.bytes)]
            found: list[bytes | memoryview] = []
            for answer in read_checked(self._storages, spans, _header_and_index_check(expected, entry.xxh3)):
                if isinstance(answer, DataError):
                    raise type(answer)(f"{answer}; restore the file or give data.sources a mirror")
                found.append(answer)
            name = f"{self._storages[0].address}/{entry.file}"
            self._indexes[shard] = read_index(bytes(found[1]), shape, entry.bytes, name)
        return self._indexes[shard]


def _header_and_index_check(expected_header: bytes, checksum: str) -> Callable[[int, bytes | memoryview], str | None]:
    """Checks span 0, the header, and span 1, the index."""

    def check(number: int, data: bytes | memoryview) -> str | None:
        if number == 0:
            return None if bytes(data) == expected_header else "the header is damaged"
        return None if index_checksum(expected_header, bytes(data)) == checksum else "the index is damaged"

    return check
