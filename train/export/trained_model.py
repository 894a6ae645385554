"""A trained model on this machine, from a run folder or one of its checkpoints, whatever engine and ranks saved it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from data_pipeline.stream.stream import open_stream
from data_pipeline.tokenizers.tokenizer import Tokenizer, load_tokenizer
from train.checkpoint.format.reader import Reader
from train.config import Recipe
from train.config_file import load_recipe
from train.errors import CheckpointError
from train.model.gpt import GPT


@dataclass(frozen=True)
class Trained:
    recipe: Recipe
    model: GPT
    """fp32, on CPU, dropout off."""
    step: int
    tokenizer: Tokenizer
    tokenizer_dir: Path


def load_trained(path: Path) -> Trained:
    """`path` is a run folder, whose newest checkpoint counts, or a checkpoint's own folder. CheckpointError."""
    checkpoint = newest_checkpoint(path)
    recipe = load_recipe(checkpoint.parent.parent / "recipe.yaml")
    try:
        reader = Reader(checkpoint)
        weights = {
            name.removeprefix("model."): torch.from_numpy(reader[name])
            for name in reader.names()
            if name.startswith("model.")
        }
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"the checkpoint {checkpoint} cannot be read: {error}; name an older one") from None
    with torch.device("meta"):
        model = GPT(recipe.model)
    model.load_state_dict(weights, strict=False, assign=True)  # a tied head is stored once
    model.tie()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise CheckpointError(f"the checkpoint {checkpoint} lacks {missing[0]} (and {len(missing) - 1} more tensors)")
    with open_stream(recipe.data, seq_len=recipe.model.seq_len) as stream:
        tokenizer_dir = stream.tokenizer_dir
    return Trained(recipe, model.eval(), reader.manifest["step"], load_tokenizer(tokenizer_dir), tokenizer_dir)


def newest_checkpoint(path: Path) -> Path:
    """The folder of the newest complete checkpoint. CheckpointError if there is none."""
    if (path / "manifest.json").exists():
        return path
    found = sorted((path / "checkpoints").glob("step-*/manifest.json"))
    if not found:
        raise CheckpointError(f"no checkpoint in {path}: expected a run folder (such as runs/laptop) or a checkpoint's")
    return found[-1].parent
