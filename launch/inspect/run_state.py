"""Whether a run waits, runs or has ended, from its folder alone."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from train.health.lease import Holder, read_lease
from train.records.events import events_backwards
from train.run_folder import RunFolder

ENDINGS = ("finished", "stopped", "failed")
BEGINNINGS = ("started", "submitted")
ACCOUNTING = ("booked", "settled")
"""Events for `keepstep report` alone."""
RECENT = 100
"""Events from the end of the file that are enough to know the state of a run."""
SILENT_SECONDS = 300
"""Seconds without a write to the folder after which a run counts as silent."""
LEASE_SECONDS = 30
"""Seconds without a renewal of the lease after which a run on another machine counts as interrupted. It is renewed
every 3 s; the rest allows for clocks that differ."""

Events = Sequence[Mapping[str, Any]]


def run_state(folder: RunFolder, events: Events, now: float) -> str:
    """Return `pending`, `new`, `running`, `silent`, `interrupted`, or one of ENDINGS, at `now` (seconds since 1970).

    A lease that is no longer held, without an event that ends the attempt, is what a killed run leaves."""
    own = [event for event in events if event["kind"] != "stop_requested"]
    last: Mapping[str, Any] = own[-1] if own else {"kind": "new", "time": 0.0}
    silent_seconds = seconds_since_write(folder, now)
    active = "new" if silent_seconds is None else "running" if silent_seconds < SILENT_SECONDS else "silent"
    lease = _holder(folder.lease)
    if lease is not None and _is_held(lease, folder.lease, now):
        started_after = lease.started > last["time"]  # a new attempt, which has written no event yet
        return active if last["kind"] not in ENDINGS or started_after else last["kind"]
    if last["kind"] in ENDINGS:
        return last["kind"]
    if last["kind"] == "submitted":
        return "pending" if waiting_jobs(events) else "stopped"
    return active if lease is None else "interrupted"


def is_held(folder: RunFolder, now: float) -> bool:
    """Return whether a live process runs in the folder."""
    return holder_of(folder, now) is not None


def holder_of(folder: RunFolder, now: float) -> Holder | None:
    """Return the live process that runs in the folder; None if there is none."""
    lease = _holder(folder.lease)
    return lease if lease is not None and _is_held(lease, folder.lease, now) else None


def waiting_jobs(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the Slurm jobs of the newest `keepstep submit`, unless `keepstep stop` came after it."""
    jobs: list[str] = []
    for event in events:
        if event["kind"] == "stop_requested":
            jobs = []
        elif event["kind"] == "submitted":
            jobs = [str(job) for job in event["jobs"]]
    return jobs


def submitted_jobs(events: Path) -> list[str]:
    """Return the Slurm jobs of the newest `keepstep submit`, whether they wait, run or have ended."""
    newest = next(events_backwards(events, ["submitted"]), None)
    return [str(job) for job in newest["jobs"]] if newest else []


def recent_events(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the last events of a run: `count` or more, and the one that began its newest attempt.

    Events for `keepstep report` alone are left out. Little more than the end of the file is read."""
    shown = (event for event in events_backwards(path) if event["kind"] not in ACCOUNTING)
    found = list(islice(shown, max(count, RECENT)))
    if not any(event["kind"] in BEGINNINGS for event in found):
        found += islice(events_backwards(path, BEGINNINGS), 1)
    return found[::-1]


def seconds_since_write(folder: RunFolder, now: float) -> float | None:
    """Return the seconds since the last write to metrics.jsonl or events.jsonl; None if there is neither."""
    written = [file.stat().st_mtime for file in (folder.metrics, folder.events) if file.exists()]
    return now - max(written) if written else None


def _holder(path: Path) -> Holder | None:
    try:
        return read_lease(path)[0]
    except OSError:
        return None


def _is_held(holder: Holder, path: Path, now: float) -> bool:
    """Return whether the holder lives: its process, if it is visible here, else its renewals of the lease."""
    me = Holder.this_process({})
    if holder.is_visible(me):
        return not holder.is_gone(me)
    try:
        return now - path.stat().st_mtime < LEASE_SECONDS
    except FileNotFoundError:  # released in this moment
        return False
