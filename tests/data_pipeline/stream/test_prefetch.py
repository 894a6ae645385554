import threading
import time
from collections.abc import Iterator

import pytest

from data_pipeline.stream.prefetch import Prefetch


def count(made: list[int]) -> Iterator[int]:
    for number in range(1000):
        made.append(number)
        yield number


def test_items_come_in_order_and_then_the_end() -> None:
    assert list(Prefetch(iter(range(50)), depth=3)) == list(range(50))


def test_it_reads_ahead_and_no_further_than_told() -> None:
    made: list[int] = []
    ahead = Prefetch(count(made), depth=3)
    assert next(ahead) == 0
    until = time.monotonic() + 10
    while len(made) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 5  # one given out, three ready, one that waits for room
    ahead.close()


def test_an_error_comes_out_in_its_place() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("the second is missing")

    ahead = Prefetch(failing(), depth=5)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match=r"the second is missing"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_a_thread_that_ended_without_a_word_is_told_after_what_it_had_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(ahead: Prefetch[int], items: Iterator[int]) -> None:
        ahead._put(next(items))

    monkeypatch.setattr(Prefetch, "_work", work)
    ahead = Prefetch(iter(range(9)), depth=5)
    assert next(ahead) == 0
    with pytest.raises(RuntimeError, match=r"reads data ahead has ended without a word"):
        next(ahead)


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    ahead = Prefetch(count([]), depth=2)
    next(ahead)
    assert threading.active_count() == before + 1
    ahead.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(ahead)
