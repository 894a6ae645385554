"""Reads the records of a run, metrics.jsonl and events.jsonl: one JSON object a line.

A log is written while processes are killed and disks fill up, and anyone may have edited it. So no line is trusted, and
no line stops a reader: what is not a record is skipped and counted, with one warning a file. The size of a file does
not matter: lines are read one by one, from either end.
"""

import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from data_pipeline.untrusted import open_file

log = logging.getLogger(__name__)

Record = dict[str, Any]
Accept = Callable[[Record], bool]

LINE_BYTES = 1 << 20
"""Longest line that is read as a record, in bytes."""
UNBROKEN_BYTES = 1 << 27
"""Bytes without an end of line after which a file is read no further: it is no log."""
DEPTH = 16
"""Levels that a record may have."""
BLOCK_BYTES = 1 << 18
"""Bytes that are read at a time from the end of a file."""


def read_jsonl(path: Path, containing: Sequence[bytes] = (b"",), accept: Accept | None = None) -> Iterator[Record]:
    """Yield the records of a file from its first line on; nothing if it does not exist.

    Lines that are no record, or that `accept` refuses, are skipped and counted. Lines with none of the bytes
    `containing` are not looked at."""
    reader = LineReader(path, containing, accept or is_sound)
    with reader.opened() as file:
        while line := file.readline(LINE_BYTES + 1):
            whole, unbroken = line, len(line)
            while not line.endswith(b"\n") and len(line) > LINE_BYTES and unbroken < UNBROKEN_BYTES:
                line = file.readline(LINE_BYTES + 1)  # too long: pass over the rest of it
                unbroken += len(line)
            if unbroken >= UNBROKEN_BYTES:
                break
            if (record := reader.record(whole)) is not None:
                yield record
    reader.warn()


def read_backwards(path: Path, containing: Sequence[bytes] = (b"",), accept: Accept | None = None) -> Iterator[Record]:
    """Yield the records of a file from its last line on. See `read_jsonl`."""
    reader = LineReader(path, containing, accept or is_sound)
    try:
        with reader.opened() as file:
            for line in _lines_backwards(file):
                if (record := reader.record(line)) is not None:
                    yield record
    finally:
        reader.warn()


def last_record(path: Path, key: str) -> Record | None:
    """Return the last record that has a key; None if there is none."""
    return next((record for record in read_backwards(path, [f'"{key}"'.encode()]) if key in record), None)


def is_sound(record: Record, depth: int = 0) -> bool:
    """Return whether each field that readers compute with has the type that it should have.

    `depth`: levels above the record, of which there may be DEPTH."""
    for name, value in record.items():
        check = _CHECKS.get(name)
        if check is is_number and type(value) is float:  # most values: a long file is read faster so
            continue
        if not (_fits(name, value, depth) if check is None else check(value)):
            return False
    return True


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer from 0 on that fits in 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def is_number(value: Any) -> bool:
    """Return whether a value is a number; losses may be infinite or NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_seconds(value: Any) -> bool:
    """Return whether a value is a number of a size that seconds may have, also those of a date."""
    return is_number(value) and -1e9 < value < 1e11


def _is_time(value: Any) -> bool:
    return is_seconds(value) and value >= 0


def _is_exit_code(value: Any) -> bool:
    return is_whole(value) and value < 256


def _are_seconds(value: Any) -> bool:
    """One number, or numbers by kind."""
    if isinstance(value, dict):
        return all(map(is_seconds, cast(Record, value).values()))
    return is_seconds(value)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "attempt", "world_size", "tokens", "data_step"), is_whole),
    **dict.fromkeys(("loss", "lr", "grad_norm", "validation_loss", "held_out_loss", "memory_gib"), is_number),
    **dict.fromkeys(("tokens_per_second", "model_flops_per_second"), is_number),
    **dict.fromkeys(("mfu", "share_of_measured_peak", "share_of_peak"), is_number),
    "time": _is_time,
    "uptime": is_seconds,
    "seconds": _are_seconds,
    "exit_code": _is_exit_code,
}
"""Fields that readers compute with, the earlier names of two of them included."""


_NUMBERS = ("loss/", "validation_", "average_validation_", "task/")
"""Beginnings of the names of values that are numbers."""


def _fits(name: str, value: Any, depth: int) -> bool:
    """Return whether a field without a check of its own can be shown: also those within it are of their types."""
    if isinstance(value, dict):
        inner = {name: part for name, part in cast(Record, value).items() if part is not None}
        return depth < DEPTH and is_sound(inner, depth + 1)
    if isinstance(value, list):
        return depth < DEPTH and all(_fits("", item, depth + 1) for item in cast(list[Any], value))
    if name.endswith("_seconds"):
        return is_seconds(value)
    return not name.startswith(_NUMBERS) or is_number(value)


class LineReader:
    """Turns the lines of one file into records, and counts those that are none."""

    def __init__(self, path: Path, containing: Sequence[bytes], accept: Accept) -> None:
        self._path, self._containing, self._accept = path, containing, accept
        self._skipped = 0

    def opened(self) -> BinaryIO:
        """Open the file; an empty one in its place if it is missing or cannot be read."""
        try:
            return os.fdopen(open_file(self._path), "rb")
        except FileNotFoundError:
            pass
        except OSError as error:
            _warn_once(f"{self._path} cannot be read: {error.strerror}")
        return io.BytesIO()

    def record(self, line: bytes) -> Record | None:
        """The record of a line; None for an empty line and for a line that is no record, or not one of those wanted."""
        if not any(part in line for part in self._containing):
            return None
        value: Any = None
        if len(line) <= LINE_BYTES:
            try:
                value = json.loads(line)
                if b"\\ud" in line or b"\\uD" in line:  # perhaps half of a surrogate pair, which nobody could print
                    value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
            except (ValueError, RecursionError):
                value = None
        if isinstance(value, dict) and self._accept(cast(Record, value)):
            return cast(Record, value)
        if line.strip() and line.endswith(b"\n"):  # without an end, it is torn or still being written
            self._skipped += 1
        return None

    def warn(self) -> None:
        """Log how many lines were skipped, once for each file."""
        if self._skipped:
            _warn_once(f"{self._path}: lines that are no records were skipped: {self._skipped}")


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def _lines_backwards(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first. Of a line that is too long, the end comes, which is too long."""
    end = file.seek(0, io.SEEK_END)
    rest, unbroken = b"", 0  # the end of a line whose beginning is not read yet, and how much of it was read
    while end and unbroken < UNBROKEN_BYTES:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        *lines, last = (file.read(end - start) + rest).split(b"\n")
        lines = [*(line + b"\n" for line in lines), last]
        yield from reversed(lines[1:])
        unbroken = unbroken + end - start if len(lines) == 1 else 0
        rest, end = lines[0][-LINE_BYTES - 1 :], start
    if rest and not end:
        yield rest
