"""What the metrics and heartbeats of a run show about its speed and its memory."""

from collections.abc import Mapping
from statistics import median
from typing import Any, cast

from launch.diagnose.evidence import Evidence, Line, Record

RECENT_STEPS = 200
FEWEST_STEPS = 10
"""Steps before the share of a kind of time is judged."""
WAIT_SHARE = 0.2
"""Share of the time in steps above which waiting for data is named."""
MANY_STARTS = 3
"""Starts without a save between them that are named."""
SLOW_FIRST_SECONDS, SLOW_FIRST_FACTOR = 60.0, 20.0
"""A first step is slow if it takes longer than both: these seconds, and this many times the median step."""


def _seconds(record: Record, *kinds: str) -> float:
    seconds: Any = record.get("seconds")
    if not isinstance(seconds, Mapping):
        return 0.0
    by_kind = cast(Mapping[str, float], seconds)
    return sum(by_kind.get(kind, 0.0) for kind in kinds)


def _line(record: Record, text: str) -> Line:
    return Line(text, float(record.get("time", 0.0)))


def data_wait(evidence: Evidence) -> Line | None:
    """Return the share of time that steps waited for data, if it is large."""
    recent = evidence.curve[1:][-RECENT_STEPS:]  # the first step waits for the first batch
    waited = sum(_seconds(record, "data_wait") for record in recent)
    total = waited + sum(_seconds(record, "step") for record in recent)
    if len(recent) < FEWEST_STEPS or waited <= WAIT_SHARE * total:
        return None
    return _line(recent[-1], f"{waited / total:.0%} of the last {len(recent)} steps was waiting for data")


def slow_first_step(evidence: Evidence) -> Line | None:
    """Return the seconds of the first step of this attempt, if it took far longer than the others."""
    attempt = evidence.curve[-1].get("attempt") if evidence.curve else None
    own = [record for record in evidence.curve if record.get("attempt") == attempt]
    if len(own) < FEWEST_STEPS or (len(own) == len(evidence.curve) and own[0]["step"] > 1):
        return None  # the curve may not reach back to the first step of the attempt
    took = [_seconds(record, "step", "compile", "data_wait") for record in own]
    usual = median(took[1:])
    if took[0] < max(SLOW_FIRST_SECONDS, SLOW_FIRST_FACTOR * usual):
        return None
    return _line(own[0], f"step {own[0]['step']} took {took[0]:.0f} s, the median step {usual:.2g} s")


def memory_is_tight(evidence: Evidence) -> Line | None:
    """Return how often allocators ran out of memory and freed their caches in this attempt, if they did."""
    if not evidence.curve:
        return None
    last = evidence.curve[-1]
    retries: Any = last.get("device_alloc_retries", 0)
    if not isinstance(retries, int | float) or retries <= 0:
        return None
    return _line(last, f"{retries:.0f} retries of the allocators up to step {last['step']}")


def starts_without_save(evidence: Evidence) -> Line | None:
    """Return how often the run has started since its newest save, if that is often."""
    starts = evidence.of_kind("started")
    if evidence.starts_without_save < MANY_STARTS or not starts:
        return None
    text = f"{evidence.starts_without_save} starts since the newest save"
    return Line(text, float(starts[-1]["time"]))


def straggler(evidence: Evidence) -> Line | None:
    """Return the slowest rank that the newest heartbeats name."""
    if not evidence.slow_ranks:
        return None
    rank = evidence.slow_ranks[0]
    others = f" ({len(evidence.slow_ranks)} stragglers)" if len(evidence.slow_ranks) > 1 else ""
    return Line(f"rank {rank} is a straggler by its newest heartbeat{others}", 0.0, rank)
