"""The names of checkpoint folders: `step-00001000`. Standard library alone, for commands that must answer fast."""

import re
from pathlib import Path

STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def committed_steps(checkpoints: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder of checkpoints, oldest first; empty if there is no such folder."""
    if not checkpoints.is_dir():
        return []
    return sorted(int(match[1]) for entry in checkpoints.iterdir() if (match := STEP.fullmatch(entry.name)))


def newest_step(checkpoints: Path) -> int | None:
    """Step of the newest complete checkpoint; None if there is none."""
    return max(committed_steps(checkpoints), default=None)
