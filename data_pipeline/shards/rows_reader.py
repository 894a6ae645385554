"""Reads rows of a data set: each block is verified when it is first touched.

A read that fails or a block that is damaged is tried again, then taken from the mirror. If that fails as well, the run
stops and names shard, block and rows; or, if quarantine is allowed, the block is replaced by the next good one, which
is the same on all ranks, and the replacement is part of the saved state.
"""

import logging
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.shards.cache import BlockCache
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import Split
from data_pipeline.shards.shard_file import (
    HEADER_BYTES,
    Rows,
    ShardIndex,
    ShardShape,
    decode_origins,
    decode_rows,
    header,
    index_checksum,
    read_index,
)
from data_pipeline.shards.storage import LocalStorage, Span, read_checked
from data_pipeline.stream.order import Indices

log = logging.getLogger(__name__)


class RowReader:
    """The rows of one split of a data set."""

    def __init__(self, dataset: DataSet, split: str, source: int, cache: BlockCache, quarantine: bool = False) -> None:
        manifest = dataset.manifest
        self._dataset, self._name, self._source, self._cache = dataset, split, source, cache
        self._split: Split = manifest.splits[split]
        self.rows = self._split.rows
        self._block_rows = manifest.block_rows
        self._shapes = [manifest.shape(shard.rows) for shard in self._split.shards]
        self._blocks_per_shard = max(1, self._shapes[0].blocks if self._shapes else 1)
        self.blocks = -(-self.rows // self._block_rows)
        self.shape: ShardShape = manifest.shape(self.rows)
        self._quarantine = quarantine
        self.quarantined: dict[int, str] = {}
        self._indexes: dict[int, ShardIndex] = {}
        mapped = isinstance(dataset.storages[0], LocalStorage) and manifest.compression == "none"
        self.cached = not mapped
        """Whether blocks go through the cache: all, or some that the mirror gave."""
        self._diverted = np.full(self.blocks, True) if self.cached else np.zeros(self.blocks, bool)
        self._verified = np.zeros(self.blocks, bool)  # of the others, which are taken from the map
        self._matrices: dict[int, Rows] = {}

    def cut_rows(self, rows: Indices, cuts: int, lanes: Indices, windows: Indices) -> tuple[Rows, NDArray[np.int64]]:
        """Tokens, and numbers of tokens in use, of rows when each stored row is cut into `cuts` rows."""
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
        """The addresses of the input files."""
        return self._dataset.files()

    def gather(self, rows: Indices, lanes: Indices, windows: Indices) -> Rows:
        """[len(rows), row_items], a copy. `lanes` and `windows` tell the cache how long the blocks are wanted."""
        while True:
            wanted = self.without_quarantined(rows) if self.quarantined else rows
            blocks = wanted // self._block_rows
            missing = self._missing(blocks)
            if not missing or self._load(missing):
                break
        direct = ~self._diverted[blocks]
        if direct.all():
            return self._take(wanted, blocks)
        out = np.empty((len(wanted), self.shape.row_items), self.shape.dtype)
        if direct.any():
            out[direct] = self._take(wanted[direct], blocks[direct])
        for place in np.flatnonzero(~direct).tolist():
            key = (self._source, int(blocks[place]))
            if key not in self._cache:  # dropped for lack of room since it was loaded
                self._load([key[1]])
            held = self._cache.get(key, (int(lanes[place]), int(windows[place])))
            out[place] = held[wanted[place] % self._block_rows]
        return out

    def _missing(self, blocks: Indices) -> list[int]:
        direct = ~self._diverted[blocks]
        unknown = direct & ~self._verified[blocks]
        if direct.all() and not unknown.any():
            return []
        return [
            block
            for block in np.unique(blocks[unknown | ~direct]).tolist()
            if not self._diverted[block] or (self._source, block) not in self._cache
        ]

    def _take(self, rows: Indices, blocks: Indices) -> Rows:
        shards = blocks // self._blocks_per_shard
        first = int(shards[0])
        if (shards == first).all():
            return self._matrix(first).take(rows - first * self._blocks_per_shard * self._block_rows, axis=0)
        out = np.empty((len(rows), self.shape.row_items), self.shape.dtype)
        for shard in np.unique(shards).tolist():
            chosen = shards == shard
            out[chosen] = self._matrix(shard)[rows[chosen] - shard * self._blocks_per_shard * self._block_rows]
        return out

    def _matrix(self, shard: int) -> Rows:
        """All rows of a mapped shard."""
        if shard not in self._matrices:
            storage, shape = self._dataset.storages[0], self._shapes[shard]
            assert isinstance(storage, LocalStorage)
            items = shape.rows * shape.row_items
            whole = np.frombuffer(storage.map(self._split.shards[shard].file), shape.dtype, items, HEADER_BYTES)
            self._matrices[shard] = whole.reshape(shape.rows, shape.row_items)
        return self._matrices[shard]

    def _load(self, blocks: Sequence[int]) -> bool:
        """Verify the blocks and keep them at hand. False if some were quarantined."""
        places = [divmod(block, self._blocks_per_shard) for block in blocks]
        spans, sums = [], []
        for shard, local in places:
            index = self._index(shard)
            begin, end = index.data_offsets[local : local + 2].tolist()
            spans.append(Span(self._split.shards[shard].file, begin, end))
            sums.append(int(index.data_sums[local]))
        answers = read_checked(self._dataset.storages, spans, lambda number, data: _differs(data, sums[number]))
        for block, (shard, local), answer in zip(blocks, places, answers, strict=True):
            if isinstance(answer, DataError):
                self._give_up(block, shard, answer)
                continue
            rows = decode_rows(answer, self._shapes[shard], local)
            if not self._diverted[block] and self._is_mapped(rows, shard):
                self._verified[block] = True
            else:
                self._diverted[block] = self.cached = True
                self._cache.put((self._source, block), rows)
        return all(block not in self.quarantined for block in blocks)

    def _is_mapped(self, rows: Rows, shard: int) -> bool:
        """Whether these rows are the mapped file's own, and not the mirror's."""
        try:
            return np.may_share_memory(rows, self._matrix(shard))
        except (OSError, ValueError):  # there is no such file here, or it is too short
            return False

    def _give_up(self, block: int, shard: int, error: DataError) -> None:
        rows = range(block * self._block_rows, min((block + 1) * self._block_rows, self.rows))
        where = f"{self._split.shards[shard].file}, block {block}, {self._name} rows {rows.start} to {rows.stop - 1}"
        if not self._quarantine:
            raise type(error)(
                f"{where} of {self._dataset.address}: {error}. Restore the file, give data.sources a mirror, or set "
                f"data.on_bad_block to quarantine to train without the block"
            )
        self.quarantined[block] = str(error)
        log.warning("quarantined %s of %s: %s", where, self._dataset.address, error)
        if len(self.quarantined) == self.blocks:
            raise DataError(f"every block of {self._dataset.address} is quarantined; restore the data set")

    def without_quarantined(self, rows: Indices) -> Indices:
        """Rows of a quarantined block become rows of the next good block."""
        out = rows.copy()
        for bad in np.intersect1d(rows // self._block_rows, list(self.quarantined)).tolist():
            good = (bad + 1) % self.blocks
            while good in self.quarantined:
                good = (good + 1) % self.blocks
            chosen = rows // self._block_rows == bad
            size = min(self._block_rows, self.rows - good * self._block_rows)
            out[chosen] = good * self._block_rows + rows[chosen] % self._block_rows % size
        return out

    def _index(self, shard: int) -> ShardIndex:
        if shard not in self._indexes:
            entry, shape = self._split.shards[shard], self._shapes[shard]
            spans = [Span(entry.file, 0, HEADER_BYTES), Span(entry.file, entry.bytes - shape.index_bytes, entry.bytes)]
            expected = header(shape)
            answers = read_checked(
                self._dataset.storages,
                spans,
                lambda number, data: (
                    ("the header is damaged" if bytes(data) != expected else None)
                    if number == 0
                    else (None if index_checksum(expected, bytes(data)) == entry.xxh3 else "the index is damaged")
                ),
            )
            for answer in answers:
                if isinstance(answer, DataError):
                    raise type(answer)(f"{answer}; restore the file or give data.sources a mirror")
            self._indexes[shard] = read_index(bytes(answers[1]), shape)  # type: ignore[arg-type]
        return self._indexes[shard]

    def origins(self, block: int) -> tuple[NDArray[np.uint32], NDArray[np.void]]:
        """Where the pieces of each row of the block begin, and the pieces, see shards.PIECE."""
        shard, local = divmod(block, self._blocks_per_shard)
        index = self._index(shard)
        begin, end = index.origin_offsets[local : local + 2].tolist()
        checksum = int(index.origin_sums[local])
        span = Span(self._split.shards[shard].file, begin, end)
        (answer,) = read_checked(self._dataset.storages, [span], lambda number, data: _differs(data, checksum))
        if isinstance(answer, DataError):
            raise answer
        return decode_origins(bytes(answer), self._shapes[shard], local)


def _differs(data: bytes | memoryview, checksum: int) -> str | None:
    return None if xxhash.xxh3_64_intdigest(data) == checksum else "the checksum is wrong"
