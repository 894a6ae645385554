"""Names of checkpoint folders, such as `step-00001000`. Standard library only, for commands that must answer fast."""

import re
from pathlib import Path

STEP = re.compile(r"step-([0-9]{8,19})")
"""Matches the name of a committed checkpoint's folder; group 1 is the step."""
DEAD_SECONDS = 24 * 3600.0
"""Age at which a partial checkpoint counts as dead, where no lock tells whether its saver is alive."""


def step_name(step: int) -> str:
    """The folder name of the checkpoint of a step."""
    return f"step-{step:08d}"


def committed_steps(checkpoints: Path) -> list[int]:
    """Steps of the committed checkpoints in a folder of checkpoints, oldest first; empty if the folder is missing."""
    if not checkpoints.is_dir():
        return []
    return sorted(int(match[1]) for entry in checkpoints.iterdir() if (match := STEP.fullmatch(entry.name)))


def newest_step(checkpoints: Path) -> int | None:
    """Step of the newest committed checkpoint; None if there is none."""
    return max(committed_steps(checkpoints), default=None)
