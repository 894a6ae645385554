"""`keepstep report RUN`: what every second of a run was spent on, over all restarts."""

import argparse
import json
from pathlib import Path
from typing import Any

from train.errors import ConfigError
from train.records.events import read_jsonl
from train.records.goodput import Account, account

WORDS = {
    "step": "steps that were kept",
    "data_wait": "waiting for data",
    "checkpoint_stall": "stalled by checkpoints",
    "evaluation": "evaluation",
    "start": "starting",
    "compile": "compiling",
    "lost_work": "work that was lost",
    "down": "down between attempts",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    events = options.run / "events.jsonl"
    if not events.exists():
        raise ConfigError(f"{events} does not exist; give the folder of a run, such as runs/laptop")
    told = list(read_jsonl(events))
    spent = account(told, read_jsonl(options.run / "metrics.jsonl"))
    happened: dict[str, int] = {}
    for event in told:
        happened[event["kind"]] = happened.get(event["kind"], 0) + 1
    print(json.dumps(as_json(spent, happened), indent=2) if options.json else as_text(options.run, spent, happened))
    return 0


def as_json(spent: Account, happened: dict[str, int]) -> dict[str, Any]:
    return {
        "goodput": spent.goodput,
        "total_seconds": spent.total,
        "seconds": spent.seconds,
        "attempts": spent.attempts,
        "kept_steps": spent.kept_steps,
        "lost_steps": spent.lost_steps,
        "events": happened,
    }


def as_text(folder: Path, spent: Account, happened: dict[str, int]) -> str:
    attempts = "1 attempt" if spent.attempts == 1 else f"{spent.attempts} attempts"
    lines = [
        f"{folder}: goodput {spent.goodput:.1%} of {spent.total:,.1f} s in {attempts}; "
        f"{spent.kept_steps} steps kept, {spent.lost_steps} lost",
        "",
    ]
    for kind, seconds in spent.seconds.items():
        share = seconds / spent.total if spent.total else 0.0
        lines.append(f"  {WORDS[kind]:24} {seconds:12,.1f} s  {share:6.1%}")
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(happened.items()))
    return "\n".join([*lines, "", f"  events: {counts}"])
