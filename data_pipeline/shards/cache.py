"""A cache of blocks in memory, with a limit in bytes."""

from collections.abc import Callable
from dataclasses import dataclass

from data_pipeline.shards.shard_file import Rows

Key = tuple[int, int]
"""Number of the source, number of the block."""


@dataclass
class _Entry:
    rows: Rows
    windows: set[tuple[int, int]]
    """The (lane, window) pairs of the order that use the block."""


class BlockCache:
    """Blocks of all sources. A block is dropped when the order has passed all its windows.

    If the limit is reached earlier, the least recently used blocks are dropped."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self.peak_bytes = 0
        self.dropped_early = 0
        """Blocks that were dropped because of the limit."""
        self._entries: dict[Key, _Entry] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key, window: tuple[int, int]) -> Rows:
        """The rows of a cached block, which this (lane, window) uses."""
        entry = self._entries[key] = self._entries.pop(key)  # moves it to the end: most recently used
        entry.windows.add(window)
        return entry.rows

    def put(self, key: Key, rows: Rows) -> None:
        """Adds a block, and drops others if the limit requires it."""
        while self._entries and self.bytes + rows.nbytes > self.limit_bytes:
            self._drop(next(iter(self._entries)))
            self.dropped_early += 1
        self._entries[key] = _Entry(rows, set())
        self.bytes += rows.nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def release(self, source: int, is_passed: Callable[[int, int], bool]) -> None:
        """Drops the source's blocks for which `is_passed(lane, window)` is true for every window that uses them."""
        for key in [key for key in self._entries if key[0] == source]:
            if all(is_passed(*window) for window in self._entries[key].windows):
                self._drop(key)

    def _drop(self, key: Key) -> None:
        self.bytes -= self._entries.pop(key).rows.nbytes
