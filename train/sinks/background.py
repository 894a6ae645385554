"""A sink that works in a thread of its own, so that it never stops or slows the run.

The loop only puts records into a queue. If the sink fails, it is off for the rest of the attempt. If it hangs, the
queue fills, and records are dropped. Either is reported once. metrics.jsonl has all records in any case, and the next
attempt gives the sink those that it lacks.
"""

import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import Full, Queue

from data_pipeline.untrusted import in_one_line
from train.sinks.sink import Figures, Sink

log = logging.getLogger(__name__)

WAITING = 1000
"""Records that wait for a sink before the next ones are dropped."""
CLOSE_SECONDS = 30.0
"""Seconds that the end of a run waits for its sinks."""

_importing = threading.Lock()
"""Held while a sink's library is imported: two threads must not import parts of each other's libraries."""


class BackgroundSink:
    """Feeds one sink from a thread, which starts with the first record. So the first step waits for no library."""

    def __init__(
        self,
        name: str,
        libraries: Sequence[str],
        build: Callable[[], Sink],
        history: Callable[[int], Iterable[tuple[int, Figures]]] = lambda step: (),
        waiting: int = WAITING,
    ) -> None:
        """`libraries`: modules that `build` imports. `history`: values of earlier attempts from a step on."""
        self._name, self._libraries, self._build, self._history = name, libraries, build, history
        self._queue: Queue[tuple[int, Figures] | None] = Queue(waiting)
        self._thread: threading.Thread | None = None
        self._has_failed = self._has_warned = False

    def log(self, step: int, figures: Figures) -> None:
        """Hand the values of a step to the sink. Returns at once."""
        if self._has_failed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"sink {self._name}", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((step, figures))
        except Full:
            self._warn("it does not keep up, so some steps are missing there")

    def finish(self) -> None:
        """Ask the sink to end after its last record. Returns at once."""
        with contextlib.suppress(Full):
            self._queue.put_nowait(None)

    def join(self, until: float) -> None:
        """Wait for the end of the sink, but not beyond a time of the monotonic clock."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._warn("it hangs, so its last steps may be missing there")

    def _work(self) -> None:
        try:
            with _importing:
                for library in self._libraries:
                    importlib.import_module(library)
            sink = self._build()
            if sink.lacks_from is not None:
                for step, figures in self._history(sink.lacks_from):
                    sink.log(step, figures)
            while (item := self._queue.get()) is not None:
                sink.log(*item)
            sink.close()
        except Exception as error:  # of whatever kind: foreign code talks to foreign machines
            self._has_failed = True
            self._warn(f"{type(error).__name__}: {in_one_line(error)}; it is off until the next start")

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("the sink %s has a problem: %s; metrics.jsonl has all steps", self._name, why)


class Sinks:
    """All sinks of a run."""

    def __init__(self, sinks: Sequence[BackgroundSink] = ()) -> None:
        self._sinks = sinks

    def log(self, step: int, figures: Figures) -> None:
        """Hand the values of a step to each sink. Returns at once."""
        for sink in self._sinks:
            sink.log(step, figures)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let the sinks write what waits, for so many seconds together."""
        for sink in self._sinks:
            sink.finish()
        until = time.monotonic() + seconds
        for sink in self._sinks:
            sink.join(until)
