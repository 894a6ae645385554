"""`events.jsonl`: what happened in a run and when, one JSON object a line, over all its attempts.

Each event has the wall-clock `time` and the process's `uptime`, both in seconds.
"""

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from train.records.clock import uptime

log = logging.getLogger(__name__)

RESERVE_BYTES = 64 * 1024
"""Bytes that a run sets aside, so that its last events can be written when the disk is full."""
TAIL_BYTES = 64 * 1024
"""Bytes at the end of a file in which its last record is searched."""


class EventLog:
    """Appends events to a file. On ranks other than 0 it is disabled and writes nothing."""

    def __init__(self, path: Path, enabled: bool = True) -> None:
        self._path = path
        self._enabled = enabled
        self._reserve = path.with_name(f".{path.name}.reserve")
        if enabled:
            with contextlib.suppress(OSError):
                end_torn_line(path)
                if not self._reserve.exists():
                    self._reserve.write_bytes(bytes(RESERVE_BYTES))

    def __call__(self, kind: str, **details: Any) -> None:
        """Append one event as one write, so that lines of two processes never mix.

        On a full disk the reserve is given up for it. If that does not help, the event is lost; the run continues."""
        if not self._enabled:
            return
        event = {"time": round(time.time(), 3), "uptime": round(uptime(), 3), "kind": kind, **details}
        line = json.dumps(event) + "\n"
        try:
            try:
                _append(self._path, line.encode())
            except OSError:
                self._reserve.unlink()
                _append(self._path, line.encode())
        except OSError as error:
            log.warning("an event was not written (%s): %s", error, line.rstrip())


def _append(path: Path, line: bytes) -> None:
    """Append a line, whole or not at all: what a full disk took of it is removed again."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(descriptor, line)
        if written < len(line):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def end_torn_line(path: Path) -> None:
    """End the last line if a killed process left it unfinished, so that lines appended later can be read."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a .jsonl file; lines that a killed process left torn are skipped."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def last_record(path: Path, key: str) -> dict[str, Any] | None:
    """Return the last object of a .jsonl file that has a key; None if the last TAIL_BYTES hold none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and key in record:
            return cast(dict[str, Any], record)
    return None
