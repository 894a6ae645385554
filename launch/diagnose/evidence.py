"""What a diagnosis knows of a run, as plain values. `reading.py` reads it from the run folder."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]

_RAISED = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception)\b|terminate called|\s*what\(\):|keepstep: rank \d+ failed:")
"""The lines of a traceback, or of a C++ program, that name the error."""


@dataclass(frozen=True)
class Line:
    """Something that a rank, the launcher, the job script or an event said."""

    text: str
    time: float
    """Seconds since 1970: of the event, or of the last write to the log."""
    rank: int | None = None
    node: str = ""
    is_error: bool = False
    """Whether it is the reason why a process ended."""

    @property
    def ends_process(self) -> bool:
        """Whether it is the reason why a process ended, or the line of a traceback that names the error."""
        return self.is_error or _RAISED.match(self.text) is not None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The newest start of a run."""

    state: str
    """State of the run (`launch.inspect.run_state.run_state`)."""
    lines: Sequence[Line] = ()
    """All that was said, without what is known to mean nothing."""
    events: Sequence[Record] = ()
    """Events of the newest start."""
    curve: Sequence[Record] = ()
    """The last records of steps, without those that a later attempt replaced."""
    first_losses: Sequence[float] = ()
    """Losses of the first steps of the run."""
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sections of the recipe, with settings as text; empty if unknown."""
    hosts: Mapping[int, str] = field(default_factory=dict[int, str])
    """Node of each rank, as far as known."""
    slow_ranks: Sequence[int] = ()
    """Stragglers, by the newest heartbeats."""
    world_size: int = 1
    saved_step: int | None = None
    """Step of the newest checkpoint."""
    progress: bool = False
    """Whether the newest start has saved a checkpoint."""
    starts_without_save: int = 0
    """Starts since the newest save."""
    free_bytes: int | None = None
    """Free space of the file system of the run folder."""
    needed_bytes: int = 0
    """Bytes of a checkpoint; 0 if none was saved."""

    def setting(self, name: str) -> str | None:
        """Return a setting such as `optim.lr` as text; None if it is not known."""
        section, _, key = name.partition(".")
        settings: Any = self.recipe.get(section)
        value: Any = settings.get(key) if isinstance(settings, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return value if isinstance(value, str) else None

    def number(self, name: str) -> float | None:
        """Return a setting as a number; None if it is none."""
        try:
            return float(self.setting(name) or "")
        except ValueError:
            return None

    def of_kind(self, *kinds: str) -> list[Record]:
        """Return the events of some kinds, oldest first."""
        return [event for event in self.events if event["kind"] in kinds]
