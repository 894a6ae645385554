"""`keepstep status RUN`: where a run stands, read from its folder alone; on any machine that sees it."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.supervise.rank_logs import root_cause
from launch.supervise.requeue import saved_step
from train.errors import ConfigError
from train.records.events import read_jsonl
from train.run_folder import RunFolder

ENDINGS = ("finished", "stopped", "failed")
SILENT_SECONDS = 300


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder, such as runs/laptop")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--events", type=int, default=5, metavar="N", help="show the last N events")


def run(options: argparse.Namespace) -> int:
    require_run(options.run)
    found = gather(options.run, time.time(), options.events)
    if options.json:
        print(json.dumps(found))
        return 0
    print(f"{options.run}: {found['state']}")
    for line in cause_lines(found["root_cause"]):
        print(f"  {line}")
    if found["step"] is not None:
        loss, speed = found.get("loss"), found.get("tokens_per_second")
        parts = [f"step {found['step']}" + (f" of {found['steps']}" if found["steps"] else "")]
        parts += [f"loss {loss:.4f}"] if loss is not None else []
        parts += [f"{speed:,.0f} tokens/s"] if speed else []
        parts.append(f"last step {_ago(found['silent_seconds'])}")
        print("  " + ", ".join(parts))
    for line in rank_lines(found["ranks"]):
        print(f"  {line}")
    saved = found["saved_step"]
    print(f"  newest checkpoint: {'none' if saved < 0 else f'step {saved}'}")
    for event in found["events"]:
        details = {k: v for k, v in event.items() if k not in ("time", "kind")}
        when = time.strftime("%F %T", time.localtime(event["time"]))
        print(f"  {when} {event['kind']} " + " ".join(f"{key}={value}" for key, value in details.items()))
    return 0


def require_run(path: Path) -> None:
    folder = RunFolder(path)  # a run that failed early has events only
    if not (folder.recipe.exists() or folder.events.exists()):
        raise ConfigError(f"{path} is not a run folder (it has no recipe.yaml); `ls runs/` shows the runs here")


def newest_ending(folder: RunFolder) -> str | None:
    """How the run ended last, unless something happened in it since."""
    kinds = [event["kind"] for event in read_jsonl(folder.events) if event["kind"] != "ended"]
    return kinds[-1] if kinds and kinds[-1] in ENDINGS else None


def _last_start(folder: RunFolder) -> float:
    """When the newest attempt began; 0 before the first."""
    return max((event["time"] for event in read_jsonl(folder.events) if event["kind"] == "started"), default=0.0)


def gather(path: Path, now: float, last_events: int) -> dict[str, Any]:
    """What the folder tells, as plain values. `state`: new, starting, running, silent, finished, stopped or failed."""
    folder = RunFolder(path)
    happened = [event for event in read_jsonl(folder.events) if event["kind"] not in ("booked", "settled")]
    steps = [row for row in read_jsonl(folder.metrics) if "loss" in row and "step" in row]
    last = steps[-1] if steps else {}
    newest = max((path_.stat().st_mtime for path_ in (folder.metrics, folder.events) if path_.exists()), default=None)
    silent_seconds = now - newest if newest else None
    ending = newest_ending(folder)
    cause = root_cause(folder.logs, _last_start(folder))
    state = ending or ("new" if silent_seconds is None else "running" if silent_seconds < SILENT_SECONDS else "silent")
    return {
        "state": state,
        "step": last.get("step"),
        "steps": _total_steps(folder.recipe),
        "loss": last.get("loss"),
        "tokens_per_second": last.get("tokens_per_second"),
        "silent_seconds": silent_seconds,
        "saved_step": saved_step(path),
        "ranks": read_status(folder.status) if state == "running" else {},
        "root_cause": asdict(cause) if cause else None,
        "stop_requested": folder.stop_request.exists(),
        "events": happened[-last_events:] if last_events else [],
    }


def read_status(path: Path) -> dict[str, Any]:
    """What the watchdog wrote last (`train.health.watchdog`); empty if there is nothing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def rank_lines(status: dict[str, Any]) -> list[str]:
    """Where the ranks are, and which of them are slow."""
    if not status:
        return []
    phases: dict[str, list[int]] = {}
    for rank in status["ranks"]:
        phases.setdefault(rank["phase"], []).append(rank["rank"])
    places = ", ".join(f"{len(ranks)} in {phase}" for phase, ranks in sorted(phases.items()))
    lines = [f"{len(status['ranks'])} ranks: {places}; the last of them got on {status['idle_seconds']:.0f} s before"]
    of_rank = {rank["rank"]: rank for rank in status["ranks"]}
    for slow in status["slow"]:
        rank = of_rank[slow]
        lines.append(f"rank {slow} on {rank['host']} is slow: its probe took {1e3 * rank['probe_seconds']:.2f} ms")
    return lines


def cause_lines(failure: dict[str, Any] | None) -> list[str]:
    """What ended the newest attempt: the failure and the last words of the rank that failed first."""
    if failure is None:
        return []
    when = time.strftime("%F %T", time.localtime(failure["time"]))
    lines = [f"root cause: rank {failure['rank']} on {failure['host']} ended by {failure['ending']} at {when}"]
    lines += [f"  | {line}" for line in failure["lines"]]
    return lines + ([f"  all of it: {failure['log']}"] if failure["log"] else [])


def _total_steps(recipe: Path) -> int | None:
    import yaml

    if not recipe.exists():
        return None
    return (yaml.safe_load(recipe.read_text(encoding="utf-8")) or {}).get("train", {}).get("steps")


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"
