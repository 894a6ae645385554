import threading
import time
from collections.abc import Iterator

import pytest

from data_pipeline.stream.prefetch import Prefetch


def count(made: list[int]) -> Iterator[int]:
    for number in range(1000):
        made.append(number)
        yield number


def test_items_come_in_order_until_the_end() -> None:
    assert list(Prefetch(iter(range(50)), depth=3)) == list(range(50))


def test_the_thread_reads_ahead_up_to_the_depth() -> None:
    made: list[int] = []
    ahead = Prefetch(count(made), depth=3)
    assert next(ahead) == 0
    until = time.monotonic() + 600
    while len(made) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 5  # one given out, three in the queue, one that waits for room
    ahead.close()


def test_an_error_is_raised_in_place_of_its_item() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("the second is missing")

    ahead = Prefetch(failing(), depth=5)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match=r"the second is missing"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_a_thread_that_died_is_reported_after_its_last_item(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(ahead: Prefetch[int], items: Iterator[int]) -> None:
        ahead._put(next(items))

    monkeypatch.setattr(Prefetch, "_work", work)
    ahead = Prefetch(iter(range(9)), depth=5)
    assert next(ahead) == 0
    with pytest.raises(RuntimeError, match=r"the prefetch thread died without an error; possibly out of memory"):
        next(ahead)


def prefetch_threads() -> int:
    """Threads of this kind alone: those of other tests may end at any moment."""
    return sum(thread.name == "keepstep-prefetch" for thread in threading.enumerate())


def test_close_stops_the_thread() -> None:
    before = prefetch_threads()
    ahead = Prefetch(count([]), depth=2)
    next(ahead)
    assert prefetch_threads() == before + 1
    ahead.close()
    assert prefetch_threads() == before
    with pytest.raises(StopIteration):
        next(ahead)
