"""What the report shows of one run, as plain values read from its folder."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from launch.inspect.events import describe
from launch.inspect.sampled_curve import SampledCurve, sampled_curve
from launch.inspect.sampled_events import EventDigest, digest_events
from launch.report.attempts import Attempt, attempts_of
from launch.report.time_shares import time_shares
from train.config_file import read_tree
from train.errors import ConfigError
from train.recipe.yaml_text import read_text
from train.records.jsonl import Record
from train.run_folder import RunFolder

_NO_VALUES = ("time", "uptime", "attempt", "data_step")
"""Numbers of records that are not drawn."""
BAD_STEPS = ("spike", "skipped", "rolled_back")
"""Kinds of events that name the samples of a bad step."""


@dataclass(frozen=True)
class RunData:
    """One run, read completely."""

    name: str
    path: Path
    curve: SampledCurve
    digest: EventDigest
    attempts: list[Attempt]
    recipe: str
    """The text of recipe.yaml; empty if it cannot be read."""
    settings: dict[str, str]
    """The recipe's settings by dotted name."""
    hosts: list[str]
    """Machines that wrote logs."""

    @property
    def began(self) -> float:
        """Wall-clock time of the first start, or of the first record."""
        firsts = [one.began for one in self.attempts[:1]] + [
            one["time"] for one in self.curve.steps[:1] if "time" in one
        ]
        return min(firsts, default=0.0)

    def events(self, *kinds: str) -> list[Record]:
        """Return the events of some kinds that were kept."""
        return [event for event in self.digest.events if event["kind"] in kinds]


def read_run(path: Path, name: str) -> RunData:
    """Return the run in a folder. ConfigError if the folder has neither metrics nor events."""
    folder = RunFolder(path)
    if not any(file.exists() for file in (folder.events, folder.metrics)):
        raise ConfigError(
            f"{path} is not a run folder: {folder.events} does not exist; give the folder of a run, such as runs/laptop"
        )
    curve, digest = sampled_curve(folder.metrics), digest_events(folder)
    last_write = curve.steps[-1].get("time") if curve.steps else None
    text, settings = _recipe(folder.recipe)
    hosts = sorted(path.name for path in folder.logs.glob("*/") if not path.name.startswith("."))
    return RunData(name, path, curve, digest, attempts_of(digest.events, last_write), text, settings, hosts)


def _recipe(path: Path) -> tuple[str, dict[str, str]]:
    try:
        return read_text(path), flattened(read_tree(path))
    except (OSError, UnicodeDecodeError, ConfigError):
        return "", {}


def flattened(tree: Any, prefix: str = "") -> dict[str, str]:
    """Return the leaves of nested mappings and lists by dotted name, as texts."""
    parts: Iterable[tuple[str, Any]]
    if isinstance(tree, dict) and tree:
        parts = cast(dict[str, Any], tree).items()
    elif isinstance(tree, list) and tree:
        parts = [(str(number), value) for number, value in enumerate(cast(list[Any], tree))]
    else:
        leaf = cast(Any, tree)
        return {prefix: "null" if leaf is None else str(leaf)}
    found: dict[str, str] = {}
    for name, value in parts:
        found |= flattened(value, f"{prefix}.{name}" if prefix else name)
    return found


def figures_of(run: RunData) -> dict[str, Any]:
    """Return what the page's script draws, as JSON values; a number that is not finite becomes null."""
    return {
        "name": run.name,
        "steps": _columns(run.curve.steps, run.began),
        "evaluations": _columns(_with_tokens(run.curve), run.began),
        "time": time_shares(run.digest.spent.spans),
        "attempts": [
            {"number": one.number, "from": _hours(one.began, run), "to": _hours(one.ended, run), "words": one.words,
             "ending": one.ending or "killed", "ranks": one.world_size}
            for one in run.attempts
        ],
        "incidents": [
            {"kind": event["kind"], "hours": _hours(event["time"], run), "words": describe(event)[:300],
             "step": event.get("step")}
            for event in run.digest.events
            if event["kind"] not in ("started", "saved", "submitted", "attention", "resumed")
        ],
        "saves": _columns(run.events("saved"), run.began),
    }  # fmt: skip


def _hours(time: float, run: RunData) -> float:
    return round((time - run.began) / 3600, 6)


def _with_tokens(curve: SampledCurve) -> list[Record]:
    """Return the evaluations with the tokens of their steps, as the nearest record of a step before tells them."""
    filled: list[Record] = []
    steps = iter([*curve.steps, {"step": math.inf}])
    before, after = {"step": 0, "tokens": 0}, next(steps)
    for one in curve.evaluations:
        while after["step"] <= one["step"]:
            before, after = after, next(steps)
        per_step = before.get("tokens", 0) / before["step"] if before["step"] else 0.0
        filled.append({"tokens": round(per_step * one["step"]), **one})
    return filled


def _columns(records: Sequence[Record], began: float) -> dict[str, list[Any]]:
    """Return the numbers of the records by name, and `hours` since the run began."""
    names = {name for one in records for name, value in one.items() if _is_shown(name, value)}
    columns = {name: [_finite(one.get(name)) for one in records] for name in sorted(names)}
    if any("time" in one for one in records):
        columns["hours"] = [round((one["time"] - began) / 3600, 6) if "time" in one else None for one in records]
    return columns


def _is_shown(name: str, value: Any) -> bool:
    return name not in _NO_VALUES and isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
