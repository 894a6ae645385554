"""`events.jsonl`: what happened in a run and when, one JSON object a line, over all its attempts.

Each event has the wall-clock `time` and the process's `uptime`, both in seconds.
"""

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.credentials import redact_all
from data_pipeline.untrusted import open_file, open_to_append
from train.records.clock import uptime
from train.records.jsonl import is_sound, read_backwards, read_jsonl

log = logging.getLogger(__name__)

RESERVE_BYTES = 64 * 1024
"""Bytes that a run sets aside, so that its last events can be written when the disk is full."""


class EventLog:
    """Appends events to a file. On ranks other than 0 it is disabled and writes nothing."""

    def __init__(self, path: Path, enabled: bool = True) -> None:
        self._path = path
        self._enabled = enabled
        self._reserve = path.with_name(f".{path.name}.reserve")
        if enabled:
            with contextlib.suppress(OSError):
                end_torn_line(path)
                if not os.path.lexists(self._reserve):
                    self._reserve.write_bytes(bytes(RESERVE_BYTES))

    def __call__(self, kind: str, **details: Any) -> None:
        """Append one event as one write, so that lines of two processes never mix.

        On a full disk the reserve is given up for it. If that does not help, the event is lost; the run continues."""
        if not self._enabled:
            return
        event = {"time": round(time.time(), 3), "uptime": round(uptime(), 3), "kind": kind, **redact_all(details)}
        line = json.dumps(event) + "\n"
        try:
            _append(self._path, line.encode())
        except OSError as error:
            try:
                self._reserve.unlink()
                _append(self._path, line.encode())
            except OSError:
                log.warning("an event was not written (%s): %s", error, line.rstrip())


def _append(path: Path, line: bytes) -> None:
    """Append a line, whole or not at all: what a full disk took of it is removed again."""
    descriptor = open_to_append(path)
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
    with os.fdopen(open_file(path, inside=path.parent), "rb") as file:
        file.seek(-1, os.SEEK_END)
        is_torn = file.read(1) != b"\n"
    if is_torn:
        _append(path, b"\n")


def read_events(path: Path, kinds: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, in order; only those of some kinds if they are given.

    Lines that are no event are skipped (`train.records.jsonl`)."""
    return _of_kinds(kinds, read_jsonl(path, _words(kinds), is_event))


def events_backwards(path: Path, kinds: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, the newest first. See `read_events`."""
    return _of_kinds(kinds, read_backwards(path, _words(kinds), is_event))


def _words(kinds: Sequence[str]) -> list[bytes]:
    """Bytes of which a line with an event of these kinds has one."""
    return [f'"{kind}"'.encode() for kind in kinds] or [b""]


def _of_kinds(kinds: Sequence[str], events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (event for event in events if event["kind"] in kinds) if kinds else events


def is_event(record: dict[str, Any]) -> bool:
    """Return whether a record is an event: its kind and time, and each field of the type that it should have."""
    known = isinstance(record.get("kind"), str) and "time" in record and is_sound(record)
    return known and (record["kind"] != "submitted" or isinstance(record.get("jobs"), list))
