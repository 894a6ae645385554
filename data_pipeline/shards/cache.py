"""Blocks held in memory, within a number of bytes."""

from collections.abc import Callable
from dataclasses import dataclass

from data_pipeline.shards.shard_file import Rows

Key = tuple[int, int]  # source, block


@dataclass
class _Held:
    rows: Rows
    windows: set[tuple[int, int]]  # (lane, window) of the order in which the block is used


class BlockCache:
    """A block is dropped when the schedule has passed it, or else when room is short, least recently used first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self.peak_bytes = 0
        self.dropped_early = 0
        self._held: dict[Key, _Held] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key, window: tuple[int, int]) -> Rows:
        held = self._held[key] = self._held.pop(key)  # now the last one used
        held.windows.add(window)
        return held.rows

    def put(self, key: Key, rows: Rows) -> None:
        while self._held and self.bytes + rows.nbytes > self.limit_bytes:
            self._drop(next(iter(self._held)))
            self.dropped_early += 1
        self._held[key] = _Held(rows, set())
        self.bytes += rows.nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def release(self, source: int, passed: Callable[[int, int], bool]) -> None:
        """Drop the source's blocks all of whose windows (lane, window) are passed."""
        for key in [key for key in self._held if key[0] == source]:
            if all(passed(*window) for window in self._held[key].windows):
                self._drop(key)

    def _drop(self, key: Key) -> None:
        self.bytes -= self._held.pop(key).rows.nbytes
