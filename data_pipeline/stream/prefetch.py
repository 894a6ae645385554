"""An iterator read ahead by a thread of this process."""

import atexit
import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

CHECK_SECONDS = 1.0
"""How often one who waits for an item sees whether the thread still lives."""


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetch(Iterator[T]):
    """Up to `depth` items are ready before they are asked for. Errors come out where their item would have.

    RuntimeError if the thread ended without a word."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._queue: queue.Queue[T | _End] = queue.Queue(depth)
        self._stopped = threading.Event()
        # A thread that still runs while the interpreter is torn down would crash it.
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._work, args=(items,), name="keepstep-prefetch", daemon=True)
        self._thread.start()

    def _work(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
            self._put(_End(None))
        except BaseException as error:
            self._put(_End(error))

    def _put(self, item: T | _End) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __next__(self) -> T:
        if self._stopped.is_set():
            raise StopIteration
        item = self._take()
        if isinstance(item, _End):
            self.close()
            if item.error is not None:
                raise item.error
            raise StopIteration
        return item

    def _take(self) -> T | _End:
        while True:
            alive = self._thread.is_alive()  # asked first: what it has put before its end is still taken
            try:
                return self._queue.get(block=alive, timeout=CHECK_SECONDS)
            except queue.Empty:
                if not alive:
                    raise RuntimeError(
                        "the thread that reads data ahead has ended without a word, killed perhaps for want of memory; "
                        "the run goes on when it is started again"
                    ) from None

    def close(self) -> None:
        """End the thread."""
        self._stopped.set()
        atexit.unregister(self.close)
        self._thread.join(timeout=10)
