import numpy as np

from data_pipeline.shards.cache import BlockCache

BLOCK = np.zeros((1, 50), np.uint16)  # 100 bytes


def test_the_cache_never_exceeds_its_limit() -> None:
    cache = BlockCache(350)
    for block in range(5):
        cache.put((0, block), BLOCK)
        assert cache.bytes <= 350
    assert [(0, block) in cache for block in range(5)] == [False, False, True, True, True]
    assert (cache.peak_bytes, cache.dropped_early) == (300, 2)


def test_the_least_recently_used_block_is_dropped_first() -> None:
    cache = BlockCache(200)
    cache.put((0, 1), BLOCK)
    cache.put((0, 2), BLOCK)
    cache.get((0, 1), (0, 0))
    cache.put((0, 3), BLOCK)
    assert (0, 1) in cache
    assert (0, 2) not in cache


def test_a_block_is_dropped_when_all_its_windows_are_passed() -> None:
    cache = BlockCache(1000)
    for source in (0, 1):
        cache.put((source, 1), BLOCK)
        cache.get((source, 1), (0, 4))
    cache.get((0, 1), (2, 5))
    cache.release(0, lambda lane, window: lane == 0)
    assert (0, 1) in cache
    cache.release(0, lambda lane, window: window <= 5)
    assert (0, 1) not in cache
    assert (1, 1) in cache
    assert cache.bytes == 100
