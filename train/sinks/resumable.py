"""What a run folder remembers of a sink, so that the next attempt of the run continues there without a gap."""

import json
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from data_pipeline.untrusted import read_file
from train.records.jsonl import is_whole, read_backwards
from train.sinks.sink import Figures, figures_of

LARGEST = 1 << 20
"""Bytes of the file that are read."""
CAUGHT_UP = 10_000
"""Records of earlier attempts that a sink is given if it lacks them."""


class SinkState:
    """The id of a run at a service, and the last step of each tag that the sink has."""

    def __init__(self, file: Path) -> None:
        """A new state if the file does not exist or is not one."""
        self._file = file
        self.id = ""
        self._last: dict[str, int] = {}
        try:
            state: Any = json.loads(read_file(file, limit=LARGEST))
            known, last = state["id"], dict(state["last"])
            if isinstance(known, str) and all(map(is_whole, last.values())):
                self.id, self._last = known, last
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass

    @property
    def last_step(self) -> int:
        """The last step of which the sink has anything; 0 if it has nothing."""
        return max(self._last.values(), default=0)

    def begin(self, run_id: str) -> None:
        """Keep the id of a new run."""
        self.id, self._last = run_id, {}
        self._write()

    def new(self, step: int, figures: Figures) -> dict[str, float]:
        """Return the values that the sink does not have yet: a resumed run computes some steps again."""
        return {tag: value for tag, value in figures.items() if step > self._last.get(tag, -1)}

    def sent(self, step: int, tags: Iterable[str]) -> None:
        """Note that the sink has the values of these tags."""
        self._last |= dict.fromkeys(tags, step)
        self._write()

    def _write(self) -> None:
        partial = self._file.with_name(f"{self._file.name}.partial")  # only this process writes it
        partial.write_text(json.dumps({"id": self.id, "last": self._last}), encoding="utf-8")
        partial.replace(self._file)


def history(metrics: Path, first: int, before: int) -> list[tuple[int, dict[str, float]]]:
    """Return the values of the steps from `first` on and below `before` in metrics.jsonl, in order.

    Of a step that was computed again, the last records count. There are CAUGHT_UP at most, the newest ones."""
    return list(islice(_backwards(metrics, first, before), CAUGHT_UP))[::-1]


def _backwards(metrics: Path, first: int, before: int) -> Iterator[tuple[int, dict[str, float]]]:
    lowest, kinds = before - 1.0, set[bool]()
    for record in read_backwards(metrics):
        step, kind = record.get("step", math.inf), "loss" in record  # else it is of an evaluation
        if step < first:
            return
        if step > lowest or (step == lowest and kind in kinds):
            continue  # computed again later
        kinds = {kind} if step < lowest else kinds | {kind}
        lowest = step
        yield step, figures_of(record)
