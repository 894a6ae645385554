"""The curve of a run, however long, as a few records for each pixel of a figure.

metrics.jsonl is read once, backwards. The records that a later attempt replaced are those whose step is not below all
steps that come after them (`train.records.curve`), so nothing has to be kept to leave them out. Of each pixel's records
four are parsed: the last one, those with the lowest and the highest loss, and the one with the highest gradient norm.
Of the others only these values are read, by a regular expression for the layout in which a run writes its steps. A line
of another layout is parsed. A line that is drawn, or that goes back to an earlier step, is always checked in full."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray

from launch.inspect.blocks import blocks_backwards, without_collections
from train.records.jsonl import LineReader, Record, is_sound

PIXELS = 800
"""Parts into which the steps of a run are divided."""
MARKS = 4000
"""Evaluations that are kept, evenly spread."""
_LAYOUT = rb'\{"time": %b, "step": (%b), "loss": (%b), "lr": %b, "grad_norm": (%b),.*+\n|.*+\n'
_STEP, _STRICT = (re.compile(_LAYOUT.replace(b"%b", value)) for value in (rb"[^,]++", rb"[^,\n]++"))
"""One line: step, loss and gradient norm of a step; three empty groups for any other line. The first is faster, but
values may span lines that are damaged; the number of lines shows it."""
_arrow: Any = pyarrow  # it has no types
_KINDS = _arrow.int64(), _arrow.float64(), _arrow.float64()
_NONE = np.iinfo(np.int64).max


@dataclass
class SampledCurve:
    """The steps and evaluations of a run that are part of it as it is now, in ascending order."""

    steps: list[Record] = field(default_factory=list[Record])
    """The records of steps that are drawn."""
    evaluations: list[Record] = field(default_factory=list[Record])
    """Records with a step and without a training loss, such as validation losses."""
    kept: int = 0
    """Steps of the curve, drawn or not."""
    replaced: int = 0
    """Records that a later attempt replaced."""


def sampled_curve(metrics: Path, pixels: int = PIXELS) -> SampledCurve:
    """Return the curve of metrics.jsonl; an empty one if the file does not exist."""
    reader = LineReader(metrics, (b"",), is_sound)
    sampler = _Sampler(reader, pixels)
    with without_collections(), reader.opened() as file:
        for number, block in enumerate(blocks_backwards(file)):
            sampler.read(block if number else _ended(block, reader))
    reader.warn()
    return sampler.curve()


def _ended(block: bytes, reader: LineReader) -> bytes:
    """Return the end of a file with an end of its last line, or without that line if it is torn."""
    whole, newline, last = block.rpartition(b"\n")
    if not last:
        return block
    return block + b"\n" if reader.record(last) is not None else whole + newline


@dataclass
class _Lines:
    """The lines of one block, as far as they are understood without parsing them."""

    block: bytes
    ends: NDArray[np.intp]
    """Position after each line."""
    steps: NDArray[np.int64]
    """Optimizer step of each line; _NONE for a line that is no step."""
    losses: NDArray[np.float64]
    norms: NDArray[np.float64]

    def line(self, index: int) -> bytes:
        """Return one line."""
        return self.block[self.ends[index - 1] if index else 0 : self.ends[index]]


class _Sampler:
    """The fold over the blocks of a file, the last block first."""

    def __init__(self, reader: LineReader, pixels: int) -> None:
        self._reader, self._pixels = reader, pixels
        self._next = _NONE
        """The lowest step of all lines that were read, which come later in the file."""
        self._last_step = 0
        self._drawn: dict[int, list[Record]] = {}
        self._marks: dict[tuple[int, tuple[str, ...]], Record] = {}
        self._curve = SampledCurve()

    def read(self, block: bytes) -> None:
        """Take in the block before those that were read."""
        if not block:
            return
        found = _understood(block)
        others = self._parse_others(found)
        self._check_returns(found)
        later = np.minimum.accumulate(np.append(found.steps, self._next)[::-1])[::-1][1:]
        kept = np.flatnonzero(found.steps < later)
        self._curve.kept += len(kept)
        self._curve.replaced += int(np.count_nonzero(found.steps != _NONE)) - len(kept)
        if len(kept):
            self._last_step = self._last_step or int(found.steps[kept[-1]])
        for index, record in reversed(others):
            if record["step"] < later[index]:
                self._mark(record)
        if len(kept):
            self._draw(found, kept)
            self._next = int(found.steps[kept[0]])

    def _parse_others(self, found: _Lines) -> list[tuple[int, Record]]:
        """Parse the lines of another layout: take in those that are steps; return evaluations with their indices."""
        others: list[tuple[int, Record]] = []
        for index in np.flatnonzero(found.steps < 0).tolist():
            found.steps[index] = _NONE
            record = self._reader.record(found.line(index))
            if record is None or "step" not in record:
                continue
            if "loss" in record or "data_step" in record:
                found.steps[index] = record["step"]
                found.losses[index] = record.get("loss", np.nan)
                found.norms[index] = record.get("grad_norm", np.nan)
            else:
                others.append((index, record))
        return others

    def _check_returns(self, found: _Lines) -> None:
        """Parse the lines that would replace those before them, the first and the last one; leave out what is none."""
        while len(rows := np.flatnonzero(found.steps != _NONE)):
            returns = np.flatnonzero(np.diff(found.steps[rows]) <= 0) + 1
            suspects = rows[[0, *returns.tolist(), -1]].tolist()
            wrong = [index for index in suspects if self._reader.record(found.line(index)) is None]
            if not wrong:
                return
            found.steps[wrong] = _NONE

    def _draw(self, found: _Lines, kept: NDArray[np.int64]) -> None:
        pixel = found.steps[kept] * self._pixels // (self._last_step + 1)
        borders = [0, *(np.flatnonzero(np.diff(pixel)) + 1).tolist(), len(kept)]
        for first, end in pairwise(borders):
            part = kept[first:end]
            losses = found.losses[part]
            picks = {0, end - first - 1} if end - first < 3 else {end - first - 1, int(losses.argmin())}
            picks |= {int(losses.argmax()), int(found.norms[part].argmax())}
            records = [self._reader.record(found.line(int(part[pick]))) for pick in sorted(picks)]
            here = self._drawn.setdefault(int(pixel[first]), [])
            here[:0] = [record for record in records if record is not None]
            if len(here) > 4:
                self._drawn[int(pixel[first])] = _extremes(here)

    def _mark(self, record: Record) -> None:
        """Keep an evaluation, if none that is later in the file has its place and its values."""
        place = record["step"] * MARKS // (max(self._last_step, record["step"]) + 1)
        if len(self._marks) < 8 * MARKS:  # more kinds of records than any run writes
            self._marks.setdefault((place, tuple(record)), record)

    def curve(self) -> SampledCurve:
        """Return what was read."""
        self._curve.steps = [record for pixel in sorted(self._drawn) for record in self._drawn[pixel]]
        self._curve.evaluations = sorted(self._marks.values(), key=lambda record: record["step"])
        return self._curve


def _extremes(records: list[Record]) -> list[Record]:
    """Return the last record, those with the lowest and highest loss, and the one with the highest gradient norm."""
    losses, norms = (np.array([one.get(name, np.nan) for one in records]) for name in ("loss", "grad_norm"))
    places = (losses.argmin(), losses.argmax(), norms.argmax())
    return [records[index] for index in sorted({len(records) - 1, *map(int, places)})]


def _understood(block: bytes) -> _Lines:
    """Return step, loss and gradient norm of each line of a block; step -1 for a line of another layout."""
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
    lines = _STEP.findall(block)
    if len(lines) != len(ends):
        lines = _STRICT.findall(block)
    columns = [list(column) for column in zip(*lines, strict=True)]
    for index in _places_of(b"", columns[0]):
        columns[0][index], columns[1][index], columns[2][index] = b"-1", b"0", b"0"
    texts = [_arrow.array(column, _arrow.binary()) for column in columns]
    try:
        steps, losses, norms = (text.cast(_arrow.string()).cast(kind) for text, kind in zip(texts, _KINDS, strict=True))
        return _Lines(block, ends, *(column.to_numpy().copy() for column in (steps, losses, norms)))
    except _arrow.ArrowInvalid:  # a line is damaged, or a value is NaN
        return _Lines(block, ends, *map(np.array, zip(*map(_numbers, *columns), strict=True)))


def _places_of(value: bytes, values: list[bytes]) -> Iterator[int]:
    place = -1
    with contextlib.suppress(ValueError):
        while True:
            place = values.index(value, place + 1)
            yield place


def _numbers(step: bytes, loss: bytes, norm: bytes) -> tuple[int, float, float]:
    with contextlib.suppress(ValueError):
        if step.isdigit() and len(step) < 19:
            return int(step), float(loss), float(norm)
    return -1, 0.0, 0.0
