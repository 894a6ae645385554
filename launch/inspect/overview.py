"""Several runs at a glance: one line for each, read from their folders alone."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.inspect.run_state import holder_of, submitted_jobs
from launch.inspect.run_status import RunStatus, is_run, read_status, require_run
from launch.inspect.sampled_events import digest_events
from train.errors import ConfigError
from train.records.events import events_backwards
from train.run_folder import RunFolder

RUNS = Path("runs")
"""Where runs are by default."""


@dataclass(frozen=True)
class Overview:
    """One run, as plain values; the objects of `keepstep status --json` for several runs."""

    run: str
    """Path of its folder."""
    state: str
    """See `launch.inspect.run_status.RunStatus`, as for the next six."""
    step: int | None
    steps: int | None
    loss: float | None
    tokens_per_second: float | None
    mfu: float | None
    saved_step: int | None
    goodput: float | None
    """Share of all seconds in which kept steps were computed; None before the first entry of the account."""
    restarts: int
    """Starts after the first one."""
    holder: str
    """The live process that trains in the folder; empty if there is none."""
    job: str
    """Its Slurm job, or the newest ones that were submitted; empty if there are none."""
    cause: str
    """Why it failed first; empty if it did not."""


def runs_at(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders among the paths and in the folders among them. ConfigError for a path without any."""
    if not paths and not RUNS.is_dir():
        raise ConfigError(f"{RUNS}/ does not exist here; name run folders, or a folder that has some")
    found: list[Path] = []
    for path in paths or [RUNS]:
        if is_run(path):
            found.append(path)
            continue
        inner = sorted(each for each in path.iterdir() if is_run(each)) if path.is_dir() else []
        if not inner:
            require_run(path)
        found += inner
    return list(dict.fromkeys(found))


def overview_of(path: Path) -> Overview:
    """Return the line of one run."""
    now, folder = time.time(), RunFolder(path)
    status = read_status(path, now, 0)
    spent = digest_events(folder).spent
    newest = next(events_backwards(folder.events, ["started"]), {"attempt": 1})
    holder = holder_of(folder, now)
    jobs = [holder.job] if holder and holder.job.isdecimal() else submitted_jobs(folder.events)
    return Overview(
        run=str(path),
        state=status.state,
        step=status.step,
        steps=status.steps,
        loss=status.loss,
        tokens_per_second=status.tokens_per_second,
        mfu=status.mfu,
        saved_step=status.saved_step,
        goodput=spent.goodput if spent.total else None,
        restarts=max(0, newest.get("attempt", 1) - 1),
        holder=str(holder) if holder else "",
        job=", ".join(jobs),
        cause=_cause(status, folder.events),
    )


def _cause(status: RunStatus, events: Path) -> str:
    """Return the failure that came first, by the ranks' logs, or else by the newest event."""
    if status.root_cause is not None:
        cause = status.root_cause
        lines: list[str] = cause["lines"]
        said = next((line for line in reversed(lines) if line.strip()), "")
        return f"rank {cause['rank']} on {cause['host']}: {cause['ending']}" + (f": {said.strip()}" if said else "")
    if status.state != "failed":
        return ""
    failed = next(events_backwards(events, ["failed"]), None)
    return str(failed.get("error", "")) if failed else ""
