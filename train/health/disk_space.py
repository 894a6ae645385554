"""Is there room for the checkpoints that the recipe asks for? Asked before the first step, not at the first save."""

import shutil
from pathlib import Path

from train.config import Recipe
from train.errors import ConfigError
from train.model.flops import count_parameters

BYTES_PER_PARAMETER = 12
"""Weight and two moments in fp32."""


def space_needed(recipe: Recipe, present: int) -> int:
    """Bytes of the checkpoints still to come, and of one more: an old one goes when the new one is complete."""
    kept = recipe.checkpoint.keep_last + recipe.checkpoint.keep_best
    if recipe.checkpoint.keep_every:
        kept += recipe.train.steps // recipe.checkpoint.keep_every
    made = -(-recipe.train.steps // recipe.checkpoint.every)
    return max(1, min(kept, made) + 1 - present) * BYTES_PER_PARAMETER * count_parameters(recipe.model)


def check_space(recipe: Recipe, checkpoints: Path) -> None:
    """ConfigError if the disk under the run folder is too full. The folder of the run exists."""
    needed = space_needed(recipe, len(list(checkpoints.glob("step-*"))))
    free = shutil.disk_usage(checkpoints.parent).free
    if free < needed:
        raise ConfigError(
            f"{checkpoints.parent} has {free / 2**30:.2f} GiB free, but the checkpoints still to come need "
            f"{needed / 2**30:.2f} GiB (checkpoint.keep_last is {recipe.checkpoint.keep_last}, and one more while it "
            "is written); free some space, keep fewer checkpoints, or set runs_dir to another disk"
        )
