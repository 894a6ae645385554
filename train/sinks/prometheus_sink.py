"""Prometheus: a file in its text format, for the textfile collector of node_exporter.

A file needs no port, no library and no network, and outlives a hang. `node_exporter --collector.textfile.directory`
reads every `*.prom` file of a folder. The file is replaced by a rename, so a reader never sees half of one. It is
removed when the run ends, and stays when the run fails: the age of `keepstep_last_step_timestamp_seconds` then tells.
"""

import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from train.records.catalogue import METRICS
from train.sinks.sink import Figures, tag_of

EVERY_SECONDS = 5.0
"""Least seconds between two writes of the file."""
GIB = 2**30
NAMES = {
    "memory_gib": ("device_memory_bytes", GIB),
    "device_clock_mhz": ("device_clock_hertz", 10**6),
    "lr": ("train_learning_rate", 1),
    "mfu": ("speed_mfu_ratio", 1),
    "share_of_measured_peak": ("speed_share_of_measured_peak_ratio", 1),
    "uptime": ("run_uptime_seconds", 1),
}
"""Name in metrics.jsonl -> its name for Prometheus, whose units are base units, and the factor between the units."""
_BY_TAG = {tag_of(name): name for name in METRICS}
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusSink:
    """Keeps the newest values of a run in one file."""

    lacks_from = None

    def __init__(self, folder: Path, run: str, every_seconds: float = EVERY_SECONDS) -> None:
        """`folder`: that of the file. `run`: the name of the run, which becomes the label `run`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"keepstep-{run}.prom"
        self._run, self._every = run, every_seconds
        self._values: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._written = -math.inf

    def log(self, step: int, figures: Figures) -> None:
        """Take in the values of a step; write the file if the last write is some seconds ago."""
        spent = {tag: value for tag, value in figures.items() if tag.startswith("seconds/")}
        for tag, value in spent.items():
            self._seconds[tag] = self._seconds.get(tag, 0.0) + value
        self._values |= {tag: value for tag, value in figures.items() if tag not in spent}
        self._values |= {"step": step, "last_step_timestamp_seconds": time.time()}
        if time.monotonic() >= self._written + self._every:
            self._written = time.monotonic()
            partial = self._file.with_name(f".{self._file.name}.{os.getpid()}")  # not *.prom, so nobody reads it
            partial.write_text(exposition(self._run, self._values, self._seconds), encoding="utf-8")
            partial.replace(self._file)

    def close(self) -> None:
        """Remove the file: a run that has ended has no current values."""
        self._file.unlink(missing_ok=True)


def exposition(run: str, values: Figures, seconds: Figures) -> str:
    """Return the text of the file. `seconds`: those since the start of the attempt, by `seconds/KIND`."""
    families: dict[str, tuple[str, str, list[str]]] = {}
    for tag, value in values.items():
        name, meaning, labels, factor = _described(tag)
        samples = families.setdefault(name, ("gauge", meaning, []))[2]
        samples.append(_sample(name, {"run": run, **labels}, value * factor))
    if seconds:
        meaning = "Seconds of this attempt by kind; the kinds are those of keepstep report."
        kinds = {tag.removeprefix("seconds/"): value for tag, value in seconds.items()}
        name = "keepstep_seconds_total"
        samples = [_sample(name, {"run": run, "kind": kind}, value) for kind, value in kinds.items()]
        families[name] = ("counter", meaning, samples)
    return "".join(_lines(families))


def _described(tag: str) -> tuple[str, str, dict[str, str], float]:
    """Return the name of a tag for Prometheus, its meaning, its labels besides `run`, and the factor to base units."""
    *group, source = tag.split("/", 2)
    if by_source := _BY_TAG.get("/".join((*group, "SOURCE"))):
        return f"keepstep_{'_'.join(group)}_by_source", METRICS[by_source], {"source": source}, 1
    known = _BY_TAG.get(tag, "")
    if known in NAMES:
        name, factor = NAMES[known]
    else:
        name, factor = _NOT_IN_A_NAME.sub("_", tag), 1
    return f"keepstep_{name}", METRICS.get(known, OTHERS.get(tag, tag)), {}, factor


OTHERS = {
    "step": METRICS["step"],
    "last_step_timestamp_seconds": "Time of the newest finished step, in seconds since 1970.",
}
"""Meanings of the values that are no tags."""


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    escaped = (f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{','.join(escaped)}}} {_number(value)}\n"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _lines(families: Mapping[str, tuple[str, str, list[str]]]) -> Iterator[str]:
    for name, (kind, meaning, samples) in families.items():
        help_text = meaning.replace("\\", r"\\").replace("\n", " ")
        yield f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"
        yield from samples
