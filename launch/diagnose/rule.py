"""A rule of `keepstep diagnose`: what it looks for, what that means, and what to do. Rules are data (`rules/`)."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property

from launch.diagnose.evidence import Evidence, Line


class Action(Enum):
    """What to do with the run."""

    RESTART = "restart"
    """The same command may succeed, so launchers start the run again."""
    STOP = "stop"
    """The same command fails the same way, or the run shall not go on: a person acts first."""
    CONTINUE = "continue"
    """Nothing needs to end or to start."""


class Level(IntEnum):
    """How near a finding is to the first cause; the lowest one wins, because the others follow from it."""

    OUTSIDE = 0
    """Something outside the ranks ended or broke them: the scheduler, the kernel, a node, a device."""
    FAULT = 1
    """A rank failed for a reason that its message names."""
    STUCK = 2
    """Nothing failed, but nothing moved any more."""
    UNEXPLAINED = 3
    """A rank failed, and its message has no rule."""
    CONSEQUENCE = 4
    """A rank failed because another one did, or nothing says why the run ended."""
    SICK = 5
    """The run trains, but not as it should."""
    WARNING = 6
    """Worth a look; the run goes on."""
    STATE = 7
    """How a run ended on its own, or that it goes on."""
    MANUAL = 8
    """A message of a command that is not part of a run; only the documentation shows it."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One kind of fault. The order of rules decides between findings of the same level and moment."""

    name: str
    section: str
    """Heading in docs/troubleshooting.md."""
    level: Level
    action: Action
    cause: str
    """What happened, as Markdown without an end mark."""
    remedy: str
    """What to do, as Markdown without an end mark."""
    sees: tuple[str, ...] = ()
    """Messages of Keepstep that show the fault; `...` stands for values."""
    signs: tuple[str, ...] = ()
    """Regular expressions for what other programs and events say. The groups `rank` and `node` name the culprit."""
    shown: str = ""
    """What a reader sees, for the documentation, where it is no message of Keepstep."""
    test: Callable[[Evidence], Line | None] | None = None
    """Finds the fault in numbers, and returns it as a line."""
    when: Callable[[Evidence], bool] | None = None
    """Whether the rule applies at all; None: always."""
    names_speaker: bool = True
    """Whether a rank that says this is the faulty one; not where all ranks judge alike."""
    external: bool = False
    """Whether the cause lies outside the run, so that one more attempt is right even without progress."""
    hints: Callable[[Evidence], list[str]] | None = None
    """What else to do in this run, from its recipe and its numbers."""

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """What to look for in lines. Signs come first, because they may name the culprit."""
        quoted = (".*".join(re.escape(part.strip()) for part in message.split("...")) for message in self.sees)
        return (*(re.compile(text) for text in self.signs), *(re.compile(text, re.DOTALL) for text in quoted))

    @cached_property
    def needs_end(self) -> bool:
        """Whether only a line counts that ended a process."""
        return self.level in (Level.FAULT, Level.UNEXPLAINED)

    def match(self, line: Line) -> re.Match[str] | None:
        """Return the first match of a pattern in a line; None if the line does not show the fault.

        A fault shows in what ended a process: a warning may say the same words."""
        if self.needs_end and not line.ends_process:
            return None
        return next((found for pattern in self.patterns if (found := pattern.search(line.text))), None)
