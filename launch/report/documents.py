"""The documents of a run's bad steps, found as `keepstep data trace` finds them."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from launch.data.runs import open_run
from train.config import Recipe
from train.errors import USER_ERRORS
from train.records.jsonl import Record

STEPS = 5
"""Bad steps whose documents are shown: the newest ones."""
SAMPLES = 8
"""Samples of a step that are looked at: the first ones."""
DOCUMENTS = 20
"""Documents of a step that are shown."""
CHARACTERS = 100
"""Characters of a document that are shown."""


def documents_of(run: Path, bad_steps: Sequence[Record]) -> list[list[str]]:
    """Return rows: global batch, sample, file, number of the document, and the beginning of its text.

    No rows if the data set is not at hand. `bad_steps`: events, those with `data_step` and `samples` count."""
    known = [event for event in bad_steps if all(isinstance(event.get(name), int) for name in ("data_step", "samples"))]
    if not known:
        return []
    try:
        recipe, states = open_run(run)
        if any("://" in source.path for source in recipe.data.sources):  # a report asks no network
            return []
        return [row for event in known[-STEPS:] for row in islice(_rows(recipe, states, event), DOCUMENTS)]
    except (*USER_ERRORS, OSError):
        return []


def _rows(recipe: Recipe, states: Sequence[dict[str, Any]], event: Record) -> Iterator[list[str]]:
    from data_pipeline.stream.trace import trace

    samples = trace(
        recipe.data,
        seq_len=recipe.model.seq_len,
        global_batch_size=recipe.train.global_batch_size,
        batch_changes=recipe.batch_changes,
        step=event["data_step"],
        positions=range(min(SAMPLES, event["samples"])),
        states=states,
    )
    for sample in samples:
        for document in sample.documents:
            text = " ".join(document.text.split())[:CHARACTERS]
            yield [str(event["data_step"]), str(sample.sample), document.file, str(document.number), text]
