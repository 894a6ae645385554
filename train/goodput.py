"""Where the time of a run went, over all its attempts. Pure: lines of events.jsonl and metrics.jsonl in, seconds out.

Each metrics record holds the seconds by kind since the record before it (`train.clock`) and the number of its attempt.
The event `started` begins an attempt, `finished` and `stopped` end it; `uptime` of an event is the seconds since its
process began. What no record tells is derived:

lost_work    what went into records of steps that were trained again later, and the time between the last record of an
             attempt and its last event (a hang, say)
down         from the last that an attempt wrote to the start of the next one's processes; the only kind that is read
             off the wall clock

The goodput is the share of all seconds in which kept steps were computed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ORDER: tuple[str, ...] = (
    "step",
    "data_wait",
    "checkpoint_stall",
    "evaluation",
    "start",
    "compile",
    "lost_work",
    "down",
)
STAYS = ("start", "compile")
"""Kinds that are what they are even if the steps after them were lost."""


@dataclass(frozen=True)
class Account:
    seconds: dict[str, float]
    """By the kinds of ORDER."""
    attempts: int
    kept_steps: int
    lost_steps: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        return self.seconds["step"] / self.total if self.total else 0.0


def account(events: Iterable[Mapping[str, Any]], records: Iterable[Mapping[str, Any]]) -> Account:
    """Events and records in the order in which they were written."""
    attempts = _attempts(events)
    timed = [record for record in records if "seconds" in record]
    seconds = dict.fromkeys(ORDER, 0.0)
    kept = _kept(timed)
    for record, stays in zip(timed, kept, strict=True):
        _book(seconds, record["seconds"], stays)
    end: float | None = None
    for number, attempt in attempts.items():
        first, last = attempt[0], attempt[-1]
        began = first["time"] - first["uptime"]
        if end is not None:
            seconds["down"] += max(0.0, began - end)
        tail = last["seconds"] if last["kind"] in ("finished", "stopped") else {}
        _book(seconds, tail, True)
        mine = [record for record in timed if record["attempt"] == number]
        booked = sum(sum(record["seconds"].values()) for record in mine) + sum(tail.values())
        unbooked = max(0.0, last["uptime"] - booked)
        seconds["lost_work" if mine else "start"] += unbooked
        end = began + booked + unbooked
    return Account(seconds, len(attempts), sum(kept), len(kept) - sum(kept))


def _attempts(events: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """The events of each attempt, from its `started` on."""
    attempts: dict[int, list[Mapping[str, Any]]] = {}
    current: list[Mapping[str, Any]] = []
    for event in events:
        if event["kind"] == "started":
            current = attempts[event["attempt"]] = []
        current.append(event)
    return attempts


def _kept(records: list[Mapping[str, Any]]) -> list[bool]:
    """Whether no later record is of the same step or an earlier one."""
    kept = []
    lowest = float("inf")
    for record in reversed(records):
        kept.append(record["step"] < lowest)
        lowest = min(lowest, record["step"])
    return kept[::-1]


def _book(seconds: dict[str, float], more: Mapping[str, float], kept: bool) -> None:
    for kind, amount in more.items():
        seconds[kind if kept or kind in STAYS else "lost_work"] += amount
