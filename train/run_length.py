"""The length of a run: `train.tokens` and `train.epochs` become `train.steps` when a recipe is read."""

import math
from typing import Any

from pydantic import ValidationError

from train.config import Recipe
from train.errors import ConfigError

PLACEHOLDER_STEPS = 1 << 40
"""Steps with which the other settings are read. They must be long enough for any warm-up."""
LENGTHS = ("train.steps", "train.tokens", "train.epochs")
"""The settings that give the length of a run. One of them is enough."""


def drop_lengths(tree: dict[str, Any]) -> None:
    """Remove the length from the recipe of a file, because an override gives it, perhaps in another unit."""
    if isinstance(train := tree.get("train"), dict):
        for name in LENGTHS:
            train.pop(name.removeprefix("train."), None)


def resolve_length(tree: dict[str, Any]) -> None:
    """Replace `train.tokens` or `train.epochs` in a recipe that was just read by the steps that they need, rounded up.

    ConfigError if two lengths are given, or if the length is no positive number. Other mistakes are left in the tree,
    for the validation that follows."""
    train = tree.get("train")
    if not isinstance(train, dict):
        return
    given = [name for name in LENGTHS if train.get(name.removeprefix("train.")) is not None]
    values = [train[name.removeprefix("train.")] for name in given]
    if len(given) > 1:
        raise ConfigError(
            f"{given[0]} ({values[0]}) and {given[1]} ({values[1]}) both give the length of the run; remove one"
        )
    if not given:
        train.pop("steps", None)  # null counts as missing
        return
    if given == ["train.steps"]:
        return
    name = given[0].removeprefix("train.")
    length = _positive(given[0], train.pop(name))
    try:
        recipe = Recipe.model_validate({**tree, "train": {**train, "steps": PLACEHOLDER_STEPS}})
    except ValidationError:
        train["steps"] = PLACEHOLDER_STEPS  # the same mistakes are found again, and then reported
        return
    sequences = length / recipe.model.seq_len if name == "tokens" else length * _sequences_of_an_epoch(recipe)
    train["steps"] = max(1, recipe.batch_sizes.steps_for(math.ceil(sequences)))


def _positive(name: str, text: Any) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < 1e18:
        raise ConfigError(f"{name} ({text}) must be a number above 0 and below 1e18, such as 1e9")
    return value


def _sequences_of_an_epoch(recipe: Recipe) -> int:
    """Training sequences of all sources together. DataError if a data set cannot be read here."""
    from data_pipeline.shards.dataset import DataSet
    from data_pipeline.shards.manifest import TRAIN

    total = 0
    for source in recipe.data.sources:
        dataset = DataSet(source.path, source.mirror)
        manifest = dataset.manifest
        total += manifest.splits[TRAIN].rows * (manifest.row_tokens // recipe.model.seq_len)
        dataset.close()
    return total
