"""Reads what is known of the newest start of a run: events, metrics, heartbeats, saved failures and logs.

Of logs and metrics only the ends are read, so the cost hardly grows with the length of a run. Nothing is written.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from launch.diagnose.evidence import Evidence, Line, Record
from launch.diagnose.logs import LINE_CHARACTERS, RankLog, job_lines, rank_lines, read_rank_logs
from launch.inspect.events import describe
from launch.inspect.run_state import BEGINNINGS, ENDINGS, is_held, run_state
from launch.inspect.run_status import read_ranks
from launch.supervise.rank_logs import Failure, saved_failures
from train.checkpoint.stores.steps import newest_step
from train.config_file import read_tree
from train.errors import ConfigError
from train.records.events import events_backwards
from train.records.jsonl import is_number, is_seconds, is_whole, read_backwards, read_jsonl
from train.run_folder import RunFolder

MOST_EVENTS = 4000
"""Events of the newest start that are looked at."""
CURVE_STEPS = 1000
"""Last steps whose records are looked at."""
FIRST_STEPS = 10
"""First steps of a run that tell the loss from which it came down."""
LATER_SECONDS = 30.0
"""Time after the event of an end after which a saved failure belongs to a later start, which had no event yet."""
CLOCK_SECONDS = 60.0
"""Time by which the clocks of nodes and of the file system may differ."""


def read_evidence(path: Path, now: float, *, since: float = 0.0, has_ended: bool = False) -> Evidence:
    """Return what is known of the newest start of the run at `path`.

    `now`, `since`: seconds since 1970; what is older than `since` is left out. `has_ended`: the caller knows that no
    process of the run is left."""
    folder = RunFolder(path)
    events = [event for event in _newest_start(folder.events) if event["time"] >= since]
    held = not has_ended and is_held(folder, now)
    state = run_state(folder, events, now)
    if state == "pending":  # what was before its submission is over
        events = events[[event["kind"] for event in events].index("submitted") :]
    began = max(_beginning(events), since)
    failures = [failure for failure in saved_failures(folder.logs) if failure.time >= began]
    ended = max((event["time"] for event in events if event["kind"] in ENDINGS), default=None)
    later = [failure for failure in failures if ended is not None and failure.time > ended + LATER_SECONDS]
    if later and not held:
        events, failures, began, state = [], later, ended or 0.0, "failed"
    elif failures and not held and state not in ENDINGS:
        state = "failed"
    elif (has_ended and state not in ENDINGS) or (state == "silent" and not held):
        state = "interrupted"
    if held:  # a saved failure is that of another start, which the run's lease refused
        failures = []
    logs = read_rank_logs(folder.logs, began - CLOCK_SECONDS)
    status = _heartbeats(folder.status, began)
    free, needed = _space(path, folder.events)
    starts = _starts_without_save(folder.events)
    return Evidence(
        state=state,
        lines=[
            *_event_lines(events),
            *_failure_lines(failures),
            *job_lines(folder.logs, began - CLOCK_SECONDS),
            *(line for log in logs for line in rank_lines(log)),
        ],
        events=events,
        curve=_curve(folder.metrics),
        first_losses=_first_losses(folder.metrics),
        recipe=_recipe(folder.recipe),
        hosts=_hosts(events, failures, logs, status),
        slow_ranks=status.get("slow", []) if state in ("running", "silent") else [],
        world_size=_world_size(events, logs),
        saved_step=newest_step(folder.checkpoints),
        progress=bool(events) and starts == 0,
        starts_without_save=starts,
        free_bytes=free,
        needed_bytes=needed,
    )


def _newest_start(path: Path) -> list[Record]:
    """Return the events from the newest `started` on, oldest first."""
    found: list[Record] = []
    for event in islice(events_backwards(path), MOST_EVENTS):
        found.append(event)
        if event["kind"] == "started":
            return found[::-1]
    return [*islice(events_backwards(path, ["started"]), 1), *found[::-1]]


def _beginning(events: Sequence[Record]) -> float:
    """Return when the processes of the newest start began, or when it was submitted; 0 if it is not known."""
    if not events or events[0]["kind"] not in BEGINNINGS:
        return 0.0
    running = float(events[0].get("uptime", 0.0)) if events[0]["kind"] == "started" else 0.0
    return float(events[0]["time"]) - running - 1.0


def _starts_without_save(path: Path) -> int:
    starts = 0
    for event in islice(events_backwards(path, ["started", "saved"]), MOST_EVENTS):
        if event["kind"] == "saved":
            break
        starts += 1
    return starts


def _event_lines(events: Sequence[Record]) -> Iterator[Line]:
    """Yield what each event says, as `event KIND: REASON`; of a failure, exit code and error."""
    for event in events:
        rank = event.get("rank") if is_whole(event.get("rank")) else None
        node = event.get("host") if isinstance(event.get("host"), str) else ""
        said = next((str(event[name]) for name in ("error", "why", "reason") if event.get(name) is not None), "")
        said = (said or describe(event))[:LINE_CHARACTERS]
        if event["kind"] == "failed":
            yield Line(f"exit code {event.get('exit_code', 1)}: {said}", event["time"], rank, is_error=True)
        else:
            yield Line(f"event {event['kind']}: {said}", event["time"], rank, str(node))


def _failure_lines(failures: Sequence[Failure]) -> Iterator[Line]:
    """Yield how the rank ended that failed first on each node, and the last errors of its log."""
    for failure in failures:
        last = next((line for line in reversed(failure.lines) if line.strip()), "")[:LINE_CHARACTERS]
        yield Line(f"{failure.ending}: {last}", failure.time, failure.rank, failure.host, is_error=True)
        for text in failure.lines:
            if text.startswith("keepstep: ") and not text.endswith("failed:"):
                yield Line(text[:LINE_CHARACTERS], failure.time, failure.rank, failure.host, is_error=True)


def _steps(records: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (record for record in records if "step" in record and is_number(record.get("loss")))


def _first_losses(metrics: Path) -> list[float]:
    return [record["loss"] for record in islice(_steps(read_jsonl(metrics, [b'"loss"'])), FIRST_STEPS)]


def _curve(metrics: Path) -> list[Record]:
    """Return the last records of steps, oldest first; of a step that was repeated, the newest record."""
    kept: list[Record] = []
    for record in islice(_steps(read_backwards(metrics, [b'"loss"'])), 4 * CURVE_STEPS):
        if not kept or record["step"] < kept[-1]["step"]:
            kept.append(record)
        if len(kept) == CURVE_STEPS:
            break
    return kept[::-1]


def _recipe(path: Path) -> dict[str, Any]:
    try:
        return read_tree(path)
    except ConfigError:
        return {}


def _heartbeats(path: Path, since: float) -> dict[str, Any]:
    """Return the newest status.json; empty if it is from before a moment."""
    status = read_ranks(path)
    return status if is_seconds(status.get("time")) and status["time"] >= since else {}


def _hosts(
    events: Sequence[Record], failures: Sequence[Failure], logs: Sequence[RankLog], status: dict[str, Any]
) -> dict[int, str]:
    """Return the node of each rank, by all that name both."""
    known: list[dict[str, Any]] = [cast(dict[str, Any], event) for event in events] + status.get("ranks", [])
    hosts: dict[int, str] = {}
    for one in known:
        if is_whole(one.get("rank")) and isinstance(one.get("host"), str):
            hosts[one["rank"]] = one["host"]
    hosts |= {log.rank: log.node for log in logs}
    return hosts | {failure.rank: failure.host for failure in failures}


def _world_size(events: Sequence[Record], logs: Sequence[RankLog]) -> int:
    stated = [event["world_size"] for event in events if is_whole(event.get("world_size"))]
    return max([*stated, *(log.world_size for log in logs), 1])


def _space(run: Path, events: Path) -> tuple[int | None, int]:
    """Return the free bytes of the run's file system, and the bytes of its newest checkpoint."""
    saved = next(events_backwards(events, ["saved"]), None)
    needed = saved.get("bytes", 0) if saved else 0
    try:
        free = os.statvfs(run)
    except OSError:
        return None, 0
    return free.f_bavail * free.f_frsize, needed if is_whole(needed) else 0
