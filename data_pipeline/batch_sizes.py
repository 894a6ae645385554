"""Values that change at certain steps of the data: global batch sizes and sequence lengths. No NumPy.

Both are pure functions of the step, so a resume needs nothing else. Steps of the data are counted from 0, and a batch
that was skipped counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Changes = Sequence[tuple[int, int]]
"""(first step, value from there on), in order of step."""


def value_at(changes: Changes, step: int) -> int:
    """The value at a step. The first change must be at step 0."""
    return next(value for first, value in reversed(changes) if first <= step)


def next_change(changes: Changes, step: int) -> int | None:
    """The first step after `step` that has a change; None if there is none."""
    return min((first for first, _ in changes if first > step), default=None)


@dataclass(frozen=True)
class BatchSizes:
    """Global batch sizes, each from one step of the data onwards."""

    log: tuple[tuple[int, int], ...]
    """(first step, sequences in a global batch), in order of step. The first one begins at step 0."""

    @classmethod
    def of(cls, size: int, saved: Mapping[str, Any] | None = None, changes: Changes = ()) -> "BatchSizes":
        """The sizes of a run that continues from a saved state of the stream; None: from step 0.

        `size` is the planned size at first, `changes` are those that are planned. What was used until the saved step
        stays, whatever is planned now."""
        planned = ((0, size), *changes)
        if saved is None:
            return cls(planned)
        now = saved["step"]
        log = [(first, past) for first, past in saved.get("batch_sizes") or [[0, saved["global_batch_size"]]]]
        if log[-1][1] != value_at(planned, now):
            log = [entry for entry in log if entry[0] < now] + [(now, value_at(planned, now))]
        return cls((*log, *(change for change in changes if change[0] > now)))

    def size(self, step: int) -> int:
        """Sequences in the global batch of a step, counted from 0."""
        return value_at(self.log, step)

    def first_sample(self, step: int) -> int:
        """Global sample at which a step begins, counted from 0."""
        before = sum((later - first) * size for (first, size), (later, _) in pairwise(self.log) if later <= step)
        first, size = next(entry for entry in reversed(self.log) if entry[0] <= step)
        return before + (step - first) * size

    def steps_for(self, samples: int) -> int:
        """The fewest steps that have at least so many samples."""
        first = max((first for first, _ in self.log if self.first_sample(first) < samples), default=0)
        return first + -(-(samples - self.first_sample(first)) // self.size(first))

    def as_json(self, step: int) -> list[list[int]]:
        """The sizes up to a step, as JSON values."""
        return [[first, size] for first, size in self.log if first <= step]
