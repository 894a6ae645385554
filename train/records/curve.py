"""The curve of a run: metrics.jsonl without the records that a later attempt replaced.

A run that resumes, or rolls back, repeats the steps after its checkpoint. Their records are in the file twice.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from train.records.jsonl import read_jsonl


def clean_curve(metrics: Path, names: Collection[str] = ()) -> dict[int, dict[str, Any]]:
    """Return the record of each step by step, in order: that of its last attempt, with its validation loss if any.

    `names`: the only values that the records keep, besides the step; a long run's whole records take much memory."""
    records = read_jsonl(metrics)
    if names:
        kept = {"step", *names}
        records = ({name: record[name] for name in kept & record.keys()} for record in records)
    return curve_of(records)


def curve_of(records: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the records of metrics.jsonl, given in the order of the file, as `clean_curve` does."""
    curve: dict[int, dict[str, Any]] = {}
    for record in records:
        step = record.get("step")
        if not isinstance(step, int):
            continue
        if "loss" in record or "data_step" in record:
            while curve and next(reversed(curve)) >= step:
                curve.popitem()
            curve[step] = dict(record)
        elif step in curve:
            curve[step] |= {name: value for name, value in record.items() if name not in ("time", "step")}
    return curve
