"""Where the time of a run went, over all its attempts. Pure: lines of events.jsonl and metrics.jsonl in, seconds out.

Each metrics record holds the seconds by kind since the record before it (`train.records.clock`) and the
number of its attempt.
The event `started` begins an attempt; `booked`, and `finished` or `stopped` at its end, hold its seconds by kind since
the event of these before. `uptime` of an event is the seconds since its process began. What neither tells is derived:

lost_work    what went into records of steps that were trained again later, and the time between the last record of an
             attempt and its last event (a hang, say)
down         from the last that an attempt wrote to the start of the next one's processes; the only kind that is read
             off the wall clock

The next attempt writes it to events.jsonl as `settled`, which may take from one kind what it gives to `lost_work`; so
the sum of `seconds` over these four kinds of events is the account of the whole run.

The goodput is the share of all seconds in which kept steps were computed.
"""

from collections.abc import Iterable, Mapping, Sequence
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
BOOKED = ("booked", "finished", "stopped")
"""Events that hold seconds of their own attempt."""
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


def account(
    events: Iterable[Mapping[str, Any]], records: Iterable[Mapping[str, Any]], resumed: int | None = None
) -> Account:
    """Events and records in the order in which they were written.

    `resumed`: the last attempt lives, books its own seconds, and goes on from this step."""
    attempts = _attempts(events)
    timed = [record for record in records if "seconds" in record]
    recorded = {number: dict.fromkeys(ORDER, 0.0) for number in attempts}
    for record in timed:
        if record["attempt"] in recorded:  # not if a full disk lost that event
            _add(recorded[record["attempt"]], record["seconds"])
    seconds = dict.fromkeys(ORDER, 0.0)
    end: float | None = None
    for number, attempt in attempts.items():
        began = attempt[0]["time"] - attempt[0]["uptime"]
        if end is not None:
            seconds["down"] += max(0.0, began - end)
        spent = _spent(attempt, recorded[number], ended=resumed is None or number != max(attempts))
        _add(seconds, spent)
        end = began + sum(spent.values())
    kept = _kept(timed, resumed)
    for record in (record for record, stays in zip(timed, kept, strict=True) if not stays):
        for kind in record["seconds"].keys() - STAYS:
            seconds[kind] -= record["seconds"][kind]
            seconds["lost_work"] += record["seconds"][kind]
    return Account(seconds, len(attempts), sum(kept), len(kept) - sum(kept))


def unsettled(
    events: Sequence[Mapping[str, Any]], records: Iterable[Mapping[str, Any]], resumed: int
) -> dict[str, float]:
    """What no event tells yet as the last attempt goes on from step `resumed`: by kind, above or below zero."""
    told = dict.fromkeys(ORDER, 0.0)
    for event in events:
        if event["kind"] in (*BOOKED, "settled"):
            _add(told, event["seconds"])
    spent = account(events, records, resumed).seconds
    return {kind: round(spent[kind] - told[kind], 6) for kind in ORDER if abs(spent[kind] - told[kind]) >= 1e-6}


def _spent(attempt: list[Mapping[str, Any]], recorded: dict[str, float], ended: bool) -> dict[str, float]:
    """By one attempt, as its events and the sum of its records tell; up to its last word if it has ended."""
    booked = dict.fromkeys(ORDER, 0.0)
    for event in attempt:
        if event["kind"] in BOOKED:
            _add(booked, event["seconds"])
    spent = {kind: max(booked[kind], recorded[kind]) for kind in ORDER}  # both from its start on; one got further
    if ended:
        silent = max(0.0, attempt[-1]["uptime"] - sum(spent.values()))
        spent["lost_work" if any(recorded.values()) else "start"] += silent
    return spent


def _add(seconds: dict[str, float], more: Mapping[str, float]) -> None:
    for kind, amount in more.items():
        seconds[kind] += amount


def _attempts(events: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """The events of each attempt, from its `started` on."""
    attempts: dict[int, list[Mapping[str, Any]]] = {}
    current: list[Mapping[str, Any]] = []
    for event in events:
        if event["kind"] == "started":
            current = attempts[event["attempt"]] = []
        current.append(event)
    return attempts


def _kept(records: list[Mapping[str, Any]], resumed: int | None) -> list[bool]:
    """Whether the run has not gone back to before it since."""
    kept = []
    lowest = float("inf") if resumed is None else resumed + 1
    for record in reversed(records):
        kept.append(record["step"] < lowest)
        lowest = min(lowest, record["step"])
    return kept[::-1]
