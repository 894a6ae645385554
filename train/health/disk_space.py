"""Checks before the first step that the disk has room for the checkpoints that the recipe asks for."""

import shutil
from pathlib import Path

from train.config import Recipe
from train.errors import ConfigError
from train.model.flops import count_parameters

BYTES_PER_PARAMETER = 12
"""Checkpoint bytes of one parameter: its weight and two moments in fp32."""
AVERAGE_BYTES = 4
"""The same of its average, with `optim.ema_decay`."""


def space_needed(recipe: Recipe, present: int) -> int:
    """Bytes that the run still needs for checkpoints. One more than it keeps, because an old checkpoint is deleted only
    after the new one is complete. `present`: number of checkpoints that exist already."""
    kept = recipe.checkpoint.keep_last + recipe.checkpoint.keep_best
    if recipe.checkpoint.keep_every:
        kept += recipe.train.steps // recipe.checkpoint.keep_every
    written = -(-recipe.train.steps // recipe.checkpoint.every)
    each = BYTES_PER_PARAMETER + (0 if recipe.optim.ema_decay is None else AVERAGE_BYTES)
    return max(1, min(kept, written) + 1 - present) * each * count_parameters(recipe.model)


def check_space(recipe: Recipe, checkpoints: Path) -> None:
    """ConfigError if the disk of the run folder, which must exist, has too little free space."""
    needed = space_needed(recipe, len(list(checkpoints.glob("step-*"))))
    free = shutil.disk_usage(checkpoints.parent).free
    if free < needed:
        raise ConfigError(
            f"{checkpoints.parent} has {free / 2**30:.2f} GiB free, but the remaining checkpoints need "
            f"{needed / 2**30:.2f} GiB (checkpoint.keep_last is {recipe.checkpoint.keep_last}, and one more while it "
            "is written); free some space, keep fewer checkpoints, or set runs_dir to another disk"
        )
