"""Counts the samples that this rank has used, although the stream reads groups of steps ahead."""

from collections import deque

from data_pipeline.stream.counters import Counts, add, count
from data_pipeline.stream.mixture import Samples, joined

UNCOUNTED_GROUPS = 64
"""Groups that may remain uncounted, because counting many together is cheap."""


class Usage:
    """Counters of the samples used, per source and epoch."""

    def __init__(self, counts: Counts | None = None) -> None:
        """Starts from the counters of earlier runs."""
        self._counts: Counts = counts or {}
        self._recent: deque[tuple[int, int, Samples]] = deque()  # first step, number of steps, samples

    def add(self, first_step: int, steps: int, samples: Samples) -> None:
        """Adds the samples of a group of steps, which begins at `first_step`, when training gets its first batch."""
        if len(self._recent) > UNCOUNTED_GROUPS:
            self._count_before(first_step - 2 * steps)  # training may still save a state of the last steps
        self._recent.append((first_step, steps, samples))

    def before(self, step: int) -> Counts:
        """The counters of all steps before `step`, which is in the last two groups or later."""
        self._count_before(step)
        counts = self._counts
        for first, steps, samples in self._recent:
            done = min(max(step - first, 0), steps)
            counts = add(counts, count(samples.part(slice(0, len(samples.sample) // steps * done))))
        return counts

    def _count_before(self, step: int) -> None:
        """Counts the groups that end at `step` or earlier."""
        done = []
        while self._recent and self._recent[0][0] + self._recent[0][1] <= step:
            done.append(self._recent.popleft()[2])
        if done:
            self._counts = add(self._counts, count(joined(done)))
