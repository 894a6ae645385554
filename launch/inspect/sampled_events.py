"""The events of a run, however many: their numbers by kind, the account of time, and a bounded number of each kind.

Lines that differ in digits alone are equally sound, so one line of each such shape is checked in full. Only the events
that the account needs are all parsed. Of the other kinds DRAWN at most are kept, evenly spread over the file."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from launch.inspect.blocks import blocks, without_collections
from train.records.events import is_event
from train.records.goodput import ENTRIES, Account, account
from train.records.jsonl import LineReader, Record, last_record
from train.run_folder import RunFolder

DRAWN = 2000
"""Events of one kind that are kept, at most."""
NEEDED = ("started", "resumed", *ENTRIES)
"""Kinds that the account is computed from."""
SHAPES = 100_000
"""Shapes of lines that are remembered."""
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_UNLIKE = re.compile(rb"\\|-0|0[eE]|0{18}|exit_code")
"""Parts of a shape whose digits decide whether a line is sound: such lines are checked one by one."""


@dataclass
class EventDigest:
    """What a report shows of events.jsonl."""

    counts: Counter[str] = field(default_factory=Counter[str])
    """Number of events by kind."""
    spent: Account = field(default_factory=lambda: account([]))
    events: list[Record] = field(default_factory=list[Record])
    """Events in the order of the file; without `booked`, and of a frequent kind only some."""


def digest_events(folder: RunFolder) -> EventDigest:
    """Return the digest of a run's events; of nothing if there are none."""
    reader = LineReader(folder.events, (b"",), is_event)
    digest, kept = EventDigest(), _Kept()
    with without_collections():
        digest.spent = account(_needed(reader, digest.counts, kept), last_record(folder.metrics, "attempt"))
    reader.warn()
    parsed = ((place, reader.record(line)) for place, line in kept.lines())
    digest.events = [record for _, record in parsed if record is not None]
    return digest


def _needed(reader: LineReader, counts: Counter[str], kept: "_Kept") -> Iterator[Record]:
    """Yield the events that the account needs; count all, and keep some lines.

    The account also needs each attempt's last sign of life, which any event may be."""
    shapes = _Shapes(reader)
    latest: dict[str, bytes] = {}
    number = 0
    with reader.opened() as file:
        for block in blocks(file):
            lines = block.split(b"\n")
            kinds = shapes.kinds(block, lines)
            here = Counter(kinds)
            counts.update({kind: count for kind, count in here.items() if kind})
            for kind in here.keys() - {"", "booked"}:
                kept.take(kind, [i for i, one in enumerate(kinds) if one == kind], lines, number)
            starts = [i for i, kind in enumerate(kinds) if kind == "started"]
            for begin, end in pairwise([0, *starts, len(kinds)]):
                if begin in starts:
                    yield from _signs_of_life(latest, reader)
                for index in [i for i in range(begin, end) if kinds[i] in NEEDED]:
                    yield from _parsed(lines[index], reader)
                latest |= zip(kinds[begin:end], lines[begin:end], strict=False)
            number += len(kinds)
    yield from _signs_of_life(latest, reader)


def _signs_of_life(latest: dict[str, bytes], reader: LineReader) -> Iterator[Record]:
    """Yield the last event of each kind since the attempt began that was not yielded, and forget all of them."""
    lines = [line for kind, line in latest.items() if kind and kind not in NEEDED]
    latest.clear()
    for line in lines:
        yield from _parsed(line, reader)


def _parsed(line: bytes, reader: LineReader) -> Iterator[Record]:
    """Yield the event of a line that is known to be one."""
    record = reader.record(line) if b"\\" in line else json.loads(line)
    if record is not None:
        yield record


class _Shapes:
    """The kinds of events by the shape of their lines: the line with 0 in place of each digit."""

    def __init__(self, reader: LineReader) -> None:
        self._reader = reader
        self._known: dict[bytes, str] = {}

    def kinds(self, block: bytes, lines: list[bytes]) -> list[str]:
        """Return the kind of each line of a block, "" for a line that is no event."""
        *shapes, last_shape = block.translate(_DIGITS).split(b"\n")
        if len(self._known) > SHAPES:
            self._known.clear()
        if new := set(shapes) - self._known.keys():
            samples = dict(zip(shapes, lines, strict=False))
            for shape in new:
                self._known[shape] = "?" if _UNLIKE.search(shape) else self._kind(samples[shape] + b"\n")
        kinds = list(map(self._known.__getitem__, shapes))
        one_by_one = set(_with_leading_zeros(block))
        if "?" in kinds:
            one_by_one |= {index for index, kind in enumerate(kinds) if kind == "?"}
        for index in one_by_one - {len(kinds)}:
            kinds[index] = self._kind(lines[index] + b"\n")
        return [*kinds, self._kind(lines[-1])] if last_shape else kinds  # torn, unless it is sound

    def _kind(self, line: bytes) -> str:
        record = self._reader.record(line)
        return "" if record is None else str(record["kind"])


def _with_leading_zeros(block: bytes) -> list[int]:
    """Return the lines in which something like 07 stands, which is no number."""
    text = np.frombuffer(block, np.uint8)
    digit = text - np.uint8(ord("0")) < 10
    zero = (text[1:-1] == ord("0")) & digit[2:] & ~digit[:-2] & (text[:-2] != ord("."))
    places = np.flatnonzero(zero)
    return np.searchsorted(np.flatnonzero(text == ord("\n")), places).tolist() if len(places) else []


class _Kept:
    """Lines by kind, evenly thinned out when a kind has more than DRAWN."""

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[int, bytes]]] = {}
        self._seen: Counter[str] = Counter()
        self._stride: dict[str, int] = {}

    def take(self, kind: str, indices: list[int], lines: list[bytes], number: int) -> None:
        """Keep some of the lines of one kind in a block. `number`: lines of the file before the block."""
        stride = self._stride.setdefault(kind, 1)
        kept = self._lines.setdefault(kind, [])
        kept += [(number + index, lines[index] + b"\n") for index in indices[-self._seen[kind] % stride :: stride]]
        self._seen[kind] += len(indices)
        while len(kept) > DRAWN:
            kept = self._lines[kind] = kept[::2]
            self._stride[kind] *= 2

    def lines(self) -> list[tuple[int, bytes]]:
        """Return the lines that are kept, in the order of the file, with their places."""
        return sorted(line for lines in self._lines.values() for line in lines)
