"""Reads rows of a data set. Each block is verified when it is first used.

A block that cannot be read or is damaged is read again, then from the mirror. If that fails too, the run stops with an
error that names shard, block and rows. If quarantine is allowed, the block is quarantined instead (see quarantine.py).
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.shards.block_index import BlockIndex
from data_pipeline.shards.cache import BlockCache
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.quarantine import Quarantine
from data_pipeline.shards.shard_file import (
    HEADER_BYTES,
    RowNumbers,
    Rows,
    ShardShape,
    decode_origins,
    decode_rows,
    problem_of_rows,
)
from data_pipeline.shards.storage import LocalStorage, read_checked


class RowReader:
    """The rows of one split of a data set.

    Local uncompressed shards are mapped into memory, and rows are taken from the map. All other blocks, and blocks that
    only the mirror has undamaged, are read into the cache."""

    def __init__(
        self, dataset: DataSet, split: str, source: int, cache: BlockCache, allow_quarantine: bool = False
    ) -> None:
        """`source` is the number under which the cache keeps the blocks of this reader."""
        manifest = dataset.manifest
        self._dataset, self._split, self._source, self._cache = dataset, split, source, cache
        self._block_rows = manifest.block_rows
        self._index = BlockIndex(dataset, split)
        self.rows = manifest.splits[split].rows
        self.shape: ShardShape = manifest.shape(self.rows)
        self.blocks = self.shape.blocks
        self.quarantine = Quarantine(self.rows, manifest.block_rows, allow_quarantine)
        is_mapped = isinstance(dataset.storages[0], LocalStorage) and manifest.compression == "none"
        self.uses_cache = not is_mapped
        """Whether any block is read through the cache."""
        self._through_cache = np.full(self.blocks, not is_mapped)
        self._verified = np.zeros(self.blocks, bool)  # blocks of the map
        self._matrices: dict[int, Rows] = {}

    def cut_rows(self, rows: RowNumbers, cuts: int, lanes: RowNumbers, windows: RowNumbers) -> tuple[Rows, RowNumbers]:
        """Tokens and numbers of tokens in use, if each stored row is cut into `cuts` rows.

        Shapes (len(rows), row_tokens / cuts) and (len(rows),). For `lanes` and `windows` see `gather`. DataError if a
        block is damaged."""
        stored, part = np.divmod(rows, cuts)
        records = self.gather(stored, lanes, windows)
        prefix = self.shape.prefix
        used = np.ascontiguousarray(records[:, :prefix]).view("<u4")[:, 0].astype(np.int64)
        tokens = records[:, prefix:]
        if cuts == 1:
            return tokens, used
        width = self.shape.row_tokens // cuts
        cut = tokens.reshape(len(rows), cuts, width)[np.arange(len(rows)), part]
        return cut, np.clip(used - part * width, 0, width)

    @cached_property
    def files(self) -> list[str]:
        """The addresses of the input files, by number."""
        return self._dataset.files()

    def gather(self, rows: RowNumbers, lanes: RowNumbers, windows: RowNumbers) -> Rows:
        """A copy of the stored rows. Shape (len(rows), row_items). DataError if a block is damaged.

        `lanes` and `windows` of the order tell the cache how long it must keep the blocks."""
        while True:
            wanted = self.quarantine.replace(rows)
            blocks = wanted // self._block_rows
            missing = self._missing(blocks)
            if not missing or self._load(missing):
                break
        is_mapped = ~self._through_cache[blocks]
        if is_mapped.all():
            return self._take_mapped(wanted, blocks)
        out = np.empty((len(wanted), self.shape.row_items), self.shape.dtype)
        if is_mapped.any():
            out[is_mapped] = self._take_mapped(wanted[is_mapped], blocks[is_mapped])
        for i in np.flatnonzero(~is_mapped).tolist():
            key = (self._source, int(blocks[i]))
            if key not in self._cache:  # dropped since it was loaded, because the cache is small
                self._load([key[1]])
            block = self._cache.get(key, (int(lanes[i]), int(windows[i])))
            out[i] = block[wanted[i] % self._block_rows]
        return out

    def _missing(self, blocks: RowNumbers) -> list[int]:
        """The blocks that are neither verified nor cached."""
        is_mapped = ~self._through_cache[blocks]
        unverified = is_mapped & ~self._verified[blocks]
        if is_mapped.all() and not unverified.any():
            return []
        return [
            block
            for block in np.unique(blocks[unverified | ~is_mapped]).tolist()
            if not self._through_cache[block] or (self._source, block) not in self._cache
        ]

    def _take_mapped(self, rows: RowNumbers, blocks: RowNumbers) -> Rows:
        shards = blocks // self._index.blocks_per_shard
        shard_rows = self._index.blocks_per_shard * self._block_rows
        first = int(shards[0])
        if (shards == first).all():
            return self._matrix(first).take(rows - first * shard_rows, axis=0)
        out = np.empty((len(rows), self.shape.row_items), self.shape.dtype)
        for shard in np.unique(shards).tolist():
            chosen = shards == shard
            out[chosen] = self._matrix(shard)[rows[chosen] - shard * shard_rows]
        return out

    def _matrix(self, shard: int) -> Rows:
        """All rows of a mapped shard. Shape (rows, row_items)."""
        if shard not in self._matrices:
            storage, shape = self._dataset.storages[0], self._index.shapes[shard]
            assert isinstance(storage, LocalStorage)
            items = shape.rows * shape.row_items
            flat = np.frombuffer(storage.map(self._index.file(shard)), shape.dtype, items, HEADER_BYTES)
            self._matrices[shard] = flat.reshape(shape.rows, shape.row_items)
        return self._matrices[shard]

    def _load(self, blocks: Sequence[int]) -> bool:
        """Reads and verifies the blocks, and caches those that are not mapped. False if some were quarantined."""
        stored = [self._index.data(block) for block in blocks]
        answers = read_checked(
            self._dataset.storages,
            [block.span for block in stored],
            lambda number, data: stored[number].problem(data),
        )
        for block, answer in zip(blocks, answers, strict=True):
            shard, local = self._index.locate(block)
            if isinstance(answer, DataError):
                self.quarantine.add(block, self._describe(block, shard), self._dataset.address, answer)
                continue
            try:
                rows = self._decode(answer, shard, local)
            except DataError as error:
                self.quarantine.add(block, self._describe(block, shard), self._dataset.address, error)
                continue
            if not self._through_cache[block] and self._is_mapped(rows, shard):
                self._verified[block] = True
            else:
                self._through_cache[block] = self.uses_cache = True
                self._cache.put((self._source, block), rows)
        return all(block not in self.quarantine.reasons for block in blocks)

    def _decode(self, stored: bytes | memoryview, shard: int, block: int) -> Rows:
        """The rows of a block. DataError if they cannot be right, though the checksum is."""
        rows = decode_rows(stored, self._index.shapes[shard], block)
        if problem := problem_of_rows(rows, self.shape, self._dataset.manifest.vocab_size):
            raise DataError(problem)
        return rows

    def _is_mapped(self, rows: Rows, shard: int) -> bool:
        """Whether these rows are in the mapped file, and not read from the mirror."""
        try:
            return np.may_share_memory(rows, self._matrix(shard))
        except (OSError, ValueError):  # the file is missing or truncated
            return False

    def _describe(self, block: int, shard: int) -> str:
        first = block * self._block_rows
        last = min(first + self._block_rows, self.rows) - 1
        return f"{self._index.file(shard)}, block {block}, {self._split} rows {first} to {last}"

    def origins(self, block: int) -> tuple[NDArray[np.uint32], NDArray[np.void]]:
        """The first piece of each row of the block, and the pieces (PIECE). DataError if they are damaged."""
        stored = self._index.origins(block)
        (answer,) = read_checked(self._dataset.storages, [stored.span], lambda number, data: stored.problem(data))
        if isinstance(answer, DataError):
            raise answer
        shard, local = self._index.locate(block)
        return decode_origins(bytes(answer), self._index.shapes[shard], local)
