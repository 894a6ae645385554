"""Opens a model to generate with: a run folder, a checkpoint, or a folder of Hugging Face such as an export."""

from dataclasses import dataclass
from pathlib import Path

from data_pipeline.tokenizers.tokenizer import Tokenizer
from train.checkpoint.format.manifest import MANIFEST
from train.checkpoint.importing.config_json import CONFIG
from train.errors import CheckpointError
from train.export.trained_model import open_trained
from train.model.gpt import GPT


@dataclass(frozen=True)
class Opened:
    """A model with its tokenizer: fp32, on the CPU, in evaluation mode."""

    model: GPT
    tokenizer: Tokenizer
    step: int | None
    """The step of the checkpoint; None for a folder of Hugging Face."""


def open_model(path: Path, average: bool = False) -> Opened:
    """The model at a path; `average` takes the average of the weights that a run kept.

    CheckpointError or DataError if there is none, if it cannot be read, or if our model does not compute it."""
    if (path / CONFIG).is_file() and not (path / MANIFEST).exists():
        if average:
            raise CheckpointError(f"--average: {path} is a folder of Hugging Face, which has one set of weights")
        from train.generation.hugging_face import open_hugging_face  # imports DCP, which takes a second

        return Opened(*open_hugging_face(path), None)
    with open_trained(path, average) as trained:
        pass  # the tokenizer is in memory, so its files are not needed any more
    return Opened(trained.model, trained.tokenizer, trained.step)
