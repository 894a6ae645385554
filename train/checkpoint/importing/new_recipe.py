"""Writes a recipe for an imported model: the section `model` as the source states it, other sections to be edited."""

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from train.checkpoint.importing.config_json import Stated
from train.config import Recipe
from train.config_file import recipe_as_yaml
from train.errors import CheckpointError

LONGEST_SEQ_LEN = 2048
"""Largest `model.seq_len` that a written recipe gets; a longer one costs memory and may be set by hand."""
NO_DATA = "data/SET-THIS"
"""A path that does not exist: which data set has the model's tokenizer is for the user to say."""
OTHER_SECTIONS: dict[str, Any] = {
    "data": {"sources": [{"path": NO_DATA}]},
    "optim": {"lr": 1e-4, "warmup_steps": 100},
    "train": {"steps": 1000, "global_batch_size": 64, "micro_batch_size": 1},
    "checkpoint": {"every": 100},
}
"""The sections that a source does not state. The learning rate is one for a model that is trained already."""


def recipe_for(stated: Stated | None, run: Path, location: str) -> Recipe:
    """A recipe for the run folder `run` with the model of the source. CheckpointError if the source states none."""
    if stated is None:
        raise CheckpointError(
            f"{location} has no config.json of transformers, from which a recipe could be written; give a recipe with "
            "the source's model: keepstep checkpoint import SOURCE RECIPE RUN"
        )
    settings = dict(stated.settings)
    if "seq_len" not in settings:
        limits = [stated.trained_seq_len, stated.max_seq_len, LONGEST_SEQ_LEN]
        settings["seq_len"] = min(limit for limit in limits if limit is not None)
    sections = {"name": run.name, "runs_dir": str(run.parent), "model": settings, **OTHER_SECTIONS}
    try:
        return Recipe.model_validate(sections)
    except ValidationError as error:
        problems = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
        raise CheckpointError(
            f"no recipe can be written for {location}: {'; '.join(problems)}; give a recipe yourself"
        ) from None


def write_recipe(recipe: Recipe, path: Path, location: str, *, written: bool) -> None:
    """Write the recipe of an imported checkpoint beside it, by rename. `written`: no one has edited it yet."""
    head = f"# Written by `keepstep checkpoint import` from {location}.\n"
    if written:
        head += (
            "# The section model is the source's. Set data.sources, and review optim, train, parallel and checkpoint.\n"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.write_text(head + recipe_as_yaml(recipe), encoding="utf-8")
    partial.rename(path)
