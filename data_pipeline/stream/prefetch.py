"""Reads an iterator ahead in a thread of this process."""

import atexit
import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

CHECK_SECONDS = 1.0
"""How often a caller that waits for an item checks that the thread is alive."""


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetch(Iterator[T]):
    """The items of an iterator, of which up to `depth` are ready in advance.

    An error is raised in place of the item that failed. RuntimeError if the thread died without an error."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._queue: queue.Queue[T | _End] = queue.Queue(depth)
        self._stopped = threading.Event()
        # A thread that still runs while the interpreter shuts down would crash it.
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
        """Puts an item into the queue. False if the prefetch was closed in the meantime."""
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
            alive = self._thread.is_alive()  # asked before the queue, so that the last items are not lost
            try:
                return self._queue.get(block=alive, timeout=CHECK_SECONDS)
            except queue.Empty:
                if not alive:
                    raise RuntimeError(
                        "the prefetch thread died without an error; possibly out of memory. Start the run again to "
                        "resume it"
                    ) from None

    def close(self) -> None:
        """Stops the thread."""
        self._stopped.set()
        atexit.unregister(self.close)
        self._thread.join(timeout=10)
