"""`keepstep report`: show how the time of a run was spent, over all its attempts."""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from launch.terminal import add_json_option, duration, print_json, print_table, visible
from train.errors import ConfigError
from train.records.events import read_events
from train.records.goodput import Account, account
from train.records.jsonl import last_record
from train.run_folder import RunFolder

KINDS = {
    "step": "steps that were kept",
    "data_wait": "waiting for data",
    "checkpoint_stall": "stalled by checkpoints",
    "evaluation": "evaluation",
    "start": "starting",
    "compile": "compiling",
    "lost_work": "lost work",
    "down": "down between attempts",
}
"""Kinds of time (`train.records.goodput.ORDER`) as people read them."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep report`."""
    parser.epilog = "example: keepstep report runs/laptop"
    parser.add_argument("run", type=Path, help="run folder, such as runs/laptop")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print the account of the run's time, and how often each event happened."""
    folder = RunFolder(options.run)
    if not folder.events.exists():
        raise ConfigError(f"{folder.events} does not exist; give the folder of a run, such as runs/laptop")
    counts: Counter[str] = Counter()
    spent = account(_counted(read_events(folder.events), counts), last_record(folder.metrics, "attempt"))
    if options.json:
        print_json(as_json(spent, counts))
        return 0
    attempts = "1 attempt" if spent.attempts == 1 else f"{spent.attempts} attempts"
    print(
        f"{options.run}: goodput {spent.goodput:.1%} of {duration(spent.total)} in {attempts}; "
        f"{spent.kept_steps:,} steps kept, {spent.lost_steps:,} lost\n"
    )
    rows = [
        [KINDS[kind], duration(seconds), f"{_share(seconds, spent):.1%}"] for kind, seconds in spent.seconds.items()
    ]
    print_table(["spent on", ">time", ">share"], rows)
    print("\nevents: " + ", ".join(f"{count} {visible(kind)}" for kind, count in sorted(counts.items())))
    return 0


def as_json(spent: Account, counts: dict[str, int]) -> dict[str, Any]:
    """Return the account and the number of events of each kind as plain values."""
    return {
        "goodput": spent.goodput,
        "total_seconds": spent.total,
        "seconds": spent.seconds,
        "attempts": spent.attempts,
        "kept_steps": spent.kept_steps,
        "lost_steps": spent.lost_steps,
        "events": counts,
    }


def _counted(events: Iterable[dict[str, Any]], counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield the events and count their kinds, so that a long file is read once and not kept."""
    for event in events:
        counts[event["kind"]] += 1
        yield event


def _share(seconds: float, spent: Account) -> float:
    return seconds / spent.total if spent.total else 0.0
