"""The attempts of a run: when each began and ended, and why it ended. Pure: events in, plain values out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

ENDS = {"finished": "", "stopped": "reason", "failed": "error", "hang": "why"}
"""Kind of event that says why an attempt ended -> the name of the cause in it."""


@dataclass
class Attempt:
    """One start of a run."""

    number: int
    began: float
    """Wall-clock time at which its processes started, in seconds since 1970."""
    ended: float
    """Wall-clock time of its last sign of life."""
    world_size: int | None
    engine: str
    environment: str = ""
    """Device and versions, for people."""
    ending: str = ""
    """`finished`, `stopped`, `failed` or `hang`; empty if the attempt left no such event."""
    cause: str = ""

    @property
    def words(self) -> str:
        """How it ended, for people."""
        return f"{self.ending}: {self.cause}" if self.cause else self.ending or "no last event: killed, or lost"


def attempts_of(events: Iterable[Mapping[str, Any]], last_write: float | None = None) -> list[Attempt]:
    """Return the attempts in order. `last_write`: time of the newest metrics record, a sign of life of the last one."""
    found: list[Attempt] = []
    for event in events:
        time = event["time"]
        if event["kind"] == "started":
            began = time - event.get("uptime", 0.0)
            found.append(Attempt(_whole(event.get("attempt"), len(found) + 1), began, time, None, ""))
            found[-1].world_size = event.get("world_size")
            found[-1].engine = str(event.get("engine", ""))
            found[-1].environment = _environment(event)
            continue
        if not found or event["kind"] in ("submitted", "stop_requested"):
            continue
        now = found[-1]
        now.ended = max(now.ended, time)
        if event["kind"] in ENDS and now.ending != "hang":  # the ranks that a hang ends may report failures
            now.ending, name = event["kind"], ENDS[event["kind"]]
            now.cause = str(event.get(name) or "") if name else ""
    if found and last_write is not None:
        found[-1].ended = max(found[-1].ended, last_write)
    return found


def _environment(event: Mapping[str, Any]) -> str:
    versions = event.get("versions")
    parts = cast(dict[str, Any], versions).items() if isinstance(versions, dict) else ()
    return ", ".join([*filter(None, [str(event.get("device", ""))]), *(f"{name} {value}" for name, value in parts)])


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise
