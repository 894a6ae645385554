"""The state of a run, read from its folder alone; works on any machine that sees the folder."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from data_pipeline.untrusted import read_file
from launch.inspect.run_state import BEGINNINGS, is_held, recent_events, run_state, seconds_since_write, waiting_jobs
from launch.supervise.rank_logs import root_cause
from train.checkpoint.stores.steps import newest_step
from train.config_file import read_tree
from train.errors import ConfigError
from train.records.jsonl import is_seconds, is_whole, read_backwards
from train.run_folder import RunFolder

LARGEST_STATUS = 1 << 26
"""Bytes of status.json that are read: some 500 a rank."""


@dataclass(frozen=True)
class RunStatus:
    """The state of a run as plain values; the fields of `keepstep status --json`."""

    state: str
    """`pending`, `new`, `running`, `silent`, `interrupted`, `finished`, `stopped` or `failed`."""
    step: int | None
    """Last step in metrics.jsonl."""
    steps: int | None
    """Steps of the recipe."""
    loss: float | None
    """Training loss of the last step, in nats per token."""
    tokens_per_second: float | None
    mfu: float | None
    """Model FLOPs utilization of the last step, where the device's datasheet peak is known."""
    share_of_measured_peak: float | None
    """FLOPs of the last step as a share of the measured peak."""
    validation_loss: float | None
    """Last validation loss, in nats per token."""
    validation_step: int | None
    """Step of `validation_loss`."""
    silent_seconds: float | None
    """Seconds since the last write to metrics.jsonl or events.jsonl."""
    saved_step: int | None
    """Step of the newest complete checkpoint."""
    ranks: dict[str, Any]
    """The watchdog's newest status.json, if the run is running (`train.health.watchdog`)."""
    root_cause: dict[str, Any] | None
    """The rank that failed first in the newest attempt (`launch.supervise.rank_logs.Failure`)."""
    jobs: list[str]
    """Slurm jobs of a pending run."""
    stop_requested: bool
    events: list[dict[str, Any]]
    """The last events."""


def is_run(path: Path) -> bool:
    """Return whether the path is a run folder."""
    folder = RunFolder(path)  # a run that failed early has events but no recipe
    return any(file.exists() for file in (folder.recipe, folder.events, folder.root / "train.sbatch"))


def require_run(path: Path) -> None:
    """Raise ConfigError unless the path is a run folder."""
    if not is_run(path):
        raise ConfigError(f"{path} is not a run folder (it has no recipe.yaml); `ls runs/` shows the runs here")


def read_status(path: Path, now: float, last_events: int) -> RunStatus:
    """Return the state of the run at time `now` (seconds since the epoch), with its last `last_events` events."""
    folder = RunFolder(path)
    events = recent_events(folder.events, last_events)
    last = _newest(folder.metrics, b'"loss"', lambda record: "loss" in record)
    validation = _newest(folder.metrics, b'_loss"', lambda record: _validation_loss(record) is not None)
    state = run_state(folder, events, now)
    last_start = max((event["time"] for event in events if event["kind"] in BEGINNINGS), default=0.0)
    # While the run is healthy, the failure is that of another start, which the run's lease refused.
    healthy = state in ("finished", "stopped") or is_held(folder, now)
    cause = None if healthy else root_cause(folder.logs, last_start)
    if state == "pending" and cause:  # its job has started and failed before the first event
        state = "failed"
    return RunStatus(
        state=state,
        step=last.get("step"),
        steps=_total_steps(folder.recipe),
        loss=last.get("loss"),
        tokens_per_second=last.get("tokens_per_second"),
        mfu=last.get("mfu"),
        share_of_measured_peak=last.get("share_of_measured_peak", last.get("share_of_peak")),
        validation_loss=_validation_loss(validation),
        validation_step=validation.get("step"),
        silent_seconds=seconds_since_write(folder, now),
        saved_step=newest_step(folder.checkpoints),
        ranks=read_ranks(folder.status) if state == "running" else {},
        root_cause=asdict(cause) if cause else None,
        jobs=waiting_jobs(events) if state == "pending" else [],
        stop_requested=folder.stop_request.exists(),
        events=events[-last_events:] if last_events else [],
    )


def _newest(metrics: Path, containing: bytes, has: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the newest record of a step in metrics.jsonl that has a value; an empty one if there is none."""
    records = read_backwards(metrics, [containing])
    return next((record for record in records if has(record) and "step" in record), dict[str, Any]())


def _validation_loss(record: dict[str, Any]) -> float | None:
    return record.get("validation_loss", record.get("held_out_loss"))  # the second: runs before the rename


def read_ranks(path: Path) -> dict[str, Any]:
    """Return the watchdog's status.json; empty if it cannot be read as one."""
    try:
        status: Any = json.loads(read_file(path, limit=LARGEST_STATUS))
        known: set[int] = {rank["rank"] for rank in status["ranks"] if _is_rank(rank)}
        slow: list[int] = status["slow"]
        right = len(known) == len(status["ranks"]) > 0 and known.issuperset(slow)
        return status if right and is_seconds(status["idle_seconds"]) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _is_rank(rank: dict[str, Any]) -> bool:
    texts = isinstance(rank["phase"], str) and isinstance(rank["host"], str)
    return texts and is_whole(rank["rank"]) and is_seconds(rank["probe_seconds"])


def _total_steps(recipe: Path) -> int | None:
    """Return `train.steps` of a run's recipe; None if it cannot be read."""
    try:
        train: Any = read_tree(recipe).get("train")
    except ConfigError:
        return None
    steps = cast(dict[str, Any], train).get("steps") if isinstance(train, dict) else None
    return int(steps) if isinstance(steps, str) and steps.isdecimal() and len(steps) < 19 else None
