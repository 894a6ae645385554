"""Computes where the time of a run went, over all its attempts. Pure: the events of events.jsonl in, seconds out.

The events are the only source. These carry what is needed:

| event                 | what it carries                                                                           |
| --------------------- | ----------------------------------------------------------------------------------------- |
| `started`             | begins an attempt; `previous` is the last metrics record of the attempt before            |
| `booked`              | the seconds by kind since the attempt's entry before, and the `step` reached with them     |
| `finished`, `stopped` | the same, at the end of the attempt                                                       |
| `resumed`             | the `step` of the checkpoint that the run continues from; later steps are computed again  |

An entry is written after the first step of an attempt, at each save, before a roll-back and at the end. Checkpoints are
loaded at saved steps only, so each entry is either kept or lost as a whole. Two kinds of time are derived:

lost_work    seconds of entries after the step that the run resumed from, and the time between an attempt's last entry
             and its last sign of life (a hang, for example)
down         from the last sign of life of an attempt to the start of the next one's processes; the only kind that is
             read from the wall clock

Goodput is the share of all seconds in which steps that were kept were computed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

ORDER: tuple[str, ...] = (
    "step",
    "data_wait",
    "checkpoint_stall",
    "evaluation",
    "profile",
    "start",
    "compile",
    "lost_work",
    "down",
)
ENTRIES = ("booked", "finished", "stopped")
"""Events that carry seconds of their own attempt."""
_NEEDED = {"started": ("attempt",), "resumed": ("step",), "booked": ("step",)}
"""Fields that an event must have besides both clocks, by its kind."""
NEVER_LOST = ("start", "compile")
"""Kinds that keep their name even if the steps after them were lost."""


@dataclass(frozen=True)
class Span:
    """Seconds by kind that end at a moment."""

    ended: float
    """Wall-clock time in seconds since 1970."""
    seconds: dict[str, float]


@dataclass(frozen=True)
class Account:
    """Seconds and steps of a run, over all its attempts."""

    seconds: dict[str, float]
    """Seconds by kind, in the order of ORDER."""
    attempts: int
    kept_steps: int
    lost_steps: int
    spans: "tuple[Span, ...]" = ()
    """The same seconds in the order in which they were spent."""

    @property
    def total(self) -> float:
        """All seconds from the first start to the last sign of life."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of all seconds in which kept steps were computed, from 0 to 1."""
        return self.seconds["step"] / self.total if self.total else 0.0


def account(events: Iterable[Mapping[str, Any]], newest: Mapping[str, Any] | None = None) -> Account:
    """Return the account of a run from its events, in the order in which they were written.

    `newest` is the last metrics record of a run that has not ended: time after its last entry counts as `step`."""
    books = _Books()
    for event in filter(_is_usable, events):
        books.read(event)
    books.end_attempt(newest, in_progress=newest is not None)
    return Account(books.seconds(), books.attempts, books.kept_steps(), books.lost_steps, books.spans())


def _is_usable(event: Mapping[str, Any]) -> bool:
    """Return whether an event has what the account needs of its kind; a damaged log may have others."""
    kind, seconds = event["kind"], event.get("seconds")
    if kind in ENTRIES and not (isinstance(seconds, Mapping) and set(cast(Mapping[str, Any], seconds)) <= set(ORDER)):
        return False
    return all(name in event for name in ("time", "uptime", *_NEEDED.get(kind, ())))


def seconds_of_attempts(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds from start to last event of all attempts together, without the time between them."""
    total = newest = 0.0
    for event in events:
        if event["kind"] == "started":
            total, newest = total + newest, 0.0
        newest = max(newest, event.get("uptime", 0.0))
    return total + newest


@dataclass
class _Entry:
    """Seconds by kind in which a run got from one step to another."""

    first: int
    last: int
    ended: float
    """Wall-clock time at its end."""
    seconds: dict[str, float]


@dataclass
class _Attempt:
    """One start of the run, from its `started` to its last sign of life."""

    number: int
    began: float
    """Wall-clock time at which its processes started."""
    uptime: float
    """Seconds from then to its last event."""
    spent: float = 0.0
    """Seconds in its entries."""
    step: int = 0
    """Optimizer steps finished at its last entry."""
    entries: int = 0
    resumed: bool = False
    """Whether the step that it continues from is known."""
    ended: bool = False


@dataclass
class _Books:
    """The fold over the events."""

    attempts: int = 0
    lost_steps: int = 0
    _kept: list[_Entry] = field(default_factory=list[_Entry])
    _other: list[Span] = field(default_factory=list[Span])
    """Seconds that belong to no kept entry."""
    _now: _Attempt | None = None

    def read(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind == "started":
            self._start_attempt(event)
        if self._now is None:  # a full disk lost the event that began the attempt
            return
        self._now.uptime = max(self._now.uptime, event["uptime"])
        if kind == "resumed":
            self._continue_from(event["step"])
        elif kind in ENTRIES:
            self._enter(event)

    def _start_attempt(self, event: Mapping[str, Any]) -> None:
        began = event["time"] - event["uptime"]
        if self._now is not None:
            end = self.end_attempt(event.get("previous"))
            self._spend(began, down=max(0.0, began - end))
        self.attempts += 1
        self._now = _Attempt(event["attempt"], began, event["uptime"])

    def _continue_from(self, step: int) -> None:
        """Later steps will be computed again: what was spent on them is lost."""
        assert self._now is not None
        self._now.resumed, self._now.step = True, step
        for entry in [entry for entry in self._kept if entry.last > step]:
            self._kept.remove(entry)
            self.lost_steps += entry.last - entry.first
            lost = sum(seconds for kind, seconds in entry.seconds.items() if kind not in NEVER_LOST)
            never = {kind: seconds for kind, seconds in entry.seconds.items() if kind in NEVER_LOST}
            self._spend(entry.ended, **never, lost_work=lost)

    def _spend(self, ended: float, **seconds: float) -> None:
        self._other.append(Span(ended, seconds))

    def _enter(self, event: Mapping[str, Any]) -> None:
        assert self._now is not None
        if not self._now.resumed and "step" in event:  # no checkpoint was found
            self._continue_from(0)
        step = event.get("step", self._now.step)
        ended = self._now.began + event["uptime"]
        self._kept.append(_Entry(self._now.step, step, ended, dict(event["seconds"])))
        self._now.spent += sum(event["seconds"].values())
        self._now.step = step
        self._now.entries += 1
        self._now.ended |= event["kind"] != "booked"

    def end_attempt(self, newest: Mapping[str, Any] | None, in_progress: bool = False) -> float:
        """Count the time after the last entry; return the wall-clock time of the last sign of life."""
        now, self._now = self._now, None
        if now is None:
            return 0.0
        end, step = now.uptime, now.step
        if newest is not None and newest.get("attempt") == now.number:
            end, step = max(end, newest.get("uptime") or 0.0), max(step, newest.get("step") or 0)
        silent = max(0.0, end - now.spent)
        moment = now.began + max(end, now.spent)
        if not now.entries:
            self._spend(moment, start=silent)
        elif in_progress and not now.ended:
            self._kept.append(_Entry(now.step, step, moment, {"step": silent}))
        else:
            self._spend(moment, lost_work=silent)
            self.lost_steps += step - now.step
        return moment

    def seconds(self) -> dict[str, float]:
        """Return all seconds by kind."""
        sums = dict.fromkeys(ORDER, 0.0)
        for part in (*self._other, *self._kept):
            for kind, seconds in part.seconds.items():
                sums[kind] += seconds
        return sums

    def spans(self) -> tuple[Span, ...]:
        """Return all seconds, in the order of their ends."""
        parts = (*self._other, *(Span(entry.ended, entry.seconds) for entry in self._kept))
        return tuple(sorted(parts, key=lambda span: span.ended))

    def kept_steps(self) -> int:
        """Return the number of steps that are part of the run as it is now."""
        return sum(entry.last - entry.first for entry in self._kept)
