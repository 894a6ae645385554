"""`events.jsonl`: what happened in a run and when, one JSON object a line, across restarts."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events; on ranks other than 0 it is silent."""

    def __init__(self, path: Path, enabled: bool = True) -> None:
        self._path = path
        self._enabled = enabled

    def __call__(self, kind: str, **details: Any) -> None:
        """One line, one write, so that lines of two processes never mix."""
        if not self._enabled:
            return
        line = json.dumps({"time": round(time.time(), 3), "kind": kind, **details}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


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
