"""`events.jsonl`: what happened in a run and when, one JSON object a line, across restarts.

Each has the wall clock's `time` and the process's `uptime`, both in seconds.
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.records.clock import uptime

log = logging.getLogger(__name__)


class EventLog:
    """Appends events; on ranks other than 0 it is silent."""

    def __init__(self, path: Path, enabled: bool = True) -> None:
        self._path = path
        self._enabled = enabled
        if enabled:
            end_torn_line(path)

    def __call__(self, kind: str, **details: Any) -> None:
        """One line, one write, so that lines of two processes never mix. A full disk loses the event, not the run."""
        if not self._enabled:
            return
        event = {"time": round(time.time(), 3), "uptime": round(uptime(), 3), "kind": kind, **details}
        line = json.dumps(event) + "\n"
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("an event was not written (%s): %s", error, line.rstrip())


def end_torn_line(path: Path) -> None:
    """If a killed process left the last line unfinished, end it, so that what is appended next can be read."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file that a killed process may have left with a torn last line."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
