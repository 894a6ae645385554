"""Loads a trained model on this machine from a run folder or a checkpoint, whatever engine and ranks saved it.

The model's settings and the tokenizer come from the checkpoint itself. So the folder may be moved, and neither the data
set nor what a later start wrote to the run's recipe.yaml matters. Checkpoints of earlier versions have the settings
alone; for the tokenizer, the run's recipe.yaml then names the data set.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from pydantic import ValidationError

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.tokenizer import Tokenizer, load_tokenizer
from data_pipeline.untrusted import safe_path
from train.checkpoint.format.manifest import MANIFEST, Manifest
from train.checkpoint.format.reader import Reader
from train.checkpoint.format.verify import read_attachment, read_manifest
from train.checkpoint.stores.local import LocalFolder
from train.checkpoint.stores.steps import newest_step, step_name
from train.config_file import load_recipe
from train.errors import CheckpointError, ConfigError
from train.export.earlier_tokenizer import tokenizer_of_data_set
from train.model.config import ModelConfig
from train.model.gpt import GPT
from train.optim.average import average_name
from train.run_folder import RunFolder, run_of_checkpoint


@dataclass(frozen=True)
class Trained:
    """A trained model with its tokenizer."""

    model: GPT
    """The model in fp32, on the CPU, in evaluation mode."""
    step: int
    tokenizer: Tokenizer
    tokenizer_dir: Path
    """A local folder with the tokenizer's files."""


@contextmanager
def open_trained(path: Path, average: bool = False) -> Iterator[Trained]:
    """Yield the model of a checkpoint, or of the newest checkpoint of a run folder.

    `average`: its weights are the average that the run kept (`optim.ema_decay`). CheckpointError if there is no
    checkpoint or if it cannot be read."""
    checkpoint, manifest, model = load_model(path, average)
    with TemporaryDirectory(prefix="keepstep-tokenizer-") as folder:
        tokenizer_dir = tokenizer_dir_of(checkpoint, manifest, Path(folder))
        tokenizer = load_tokenizer(tokenizer_dir)
        if tokenizer.vocab_size > model.config.vocab_size:
            raise CheckpointError(
                f"the tokenizer of {checkpoint} has {tokenizer.vocab_size} tokens, more than the model's vocabulary "
                f"({model.config.vocab_size}); it is not the tokenizer of the training"
            )
        yield Trained(model, manifest.step, tokenizer, tokenizer_dir)


def load_model(path: Path, average: bool = False) -> tuple[Path, Manifest, GPT]:
    """A checkpoint's folder, its manifest and its model: fp32, on the CPU, in evaluation mode. See `open_trained`."""
    checkpoint = newest_checkpoint(path)
    manifest, _ = read_manifest(LocalFolder(checkpoint))
    return checkpoint, manifest, _load_model(checkpoint, manifest, average)


def newest_checkpoint(path: Path) -> Path:
    """The newest checkpoint of a run folder, or the path itself if it is a checkpoint. CheckpointError if neither."""
    if (path / MANIFEST).exists():
        return path
    for checkpoints in (RunFolder(path).checkpoints, path):
        if (step := newest_step(checkpoints)) is not None:
            return checkpoints / step_name(step)
    raise CheckpointError(
        f"{path} has no checkpoint; name a run folder (such as runs/laptop) or a checkpoint's own folder"
    )


def _load_model(checkpoint: Path, manifest: Manifest, average: bool) -> GPT:
    config = _model_config(checkpoint, manifest)
    if config.n_layers > len(manifest.pieces):  # before so many layers are built
        raise CheckpointError(f"the checkpoint {checkpoint} states {config.n_layers} layers, more than it has tensors")
    try:
        reader = Reader(checkpoint)
        names = [name for name in reader.names() if name.startswith("model.")]
        if average and not all(average_name(name) in manifest.pieces for name in names):
            raise CheckpointError(
                f"--average: {checkpoint} has no average of weights; train with optim.ema_decay, or leave it out"
            )
        weights = {
            name.removeprefix("model."): torch.from_numpy(reader[average_name(name) if average else name])
            for name in names
        }
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint} cannot be read: {error}; name an older checkpoint of the run"
        ) from None
    with torch.device("meta"):
        model = GPT(config)
    _check_weights(checkpoint, model, weights)
    model.load_state_dict(weights, strict=False, assign=True)  # a tied head is stored once, so it is missing here
    model.tie()
    return model.eval()


def _check_weights(checkpoint: Path, model: GPT, weights: dict[str, torch.Tensor]) -> None:
    """CheckpointError unless the weights have the names and shapes of the model's parameters."""
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    wrong = sorted(wanted.keys() ^ weights.keys())
    wrong += sorted(name for name in wanted.keys() & weights.keys() if wanted[name] != weights[name].shape)
    if wrong:
        raise CheckpointError(
            f"the weights in {checkpoint} are not those of its model's settings: {wrong[0]} and {len(wrong) - 1} more "
            "are missing, unexpected or of another shape; name a checkpoint that Keepstep saved"
        )


def _model_config(checkpoint: Path, manifest: Manifest) -> ModelConfig:
    """The model's settings as the checkpoint states them; those of the run's recipe if it was imported without them."""
    stated = (manifest.recipe or manifest.identity).get("model")
    if stated is None:
        return load_recipe(run_of_checkpoint(checkpoint).recipe).model
    try:
        return ModelConfig.model_validate(stated)
    except ValidationError as error:
        problem = error.errors()[0]
        raise CheckpointError(
            f"the checkpoint {checkpoint} has settings of a model that this Keepstep cannot build: "
            f"model.{'.'.join(map(str, problem['loc']))}: {problem['msg']}; use the Keepstep that wrote it "
            f"({manifest.versions.get('keepstep', 'unknown')})"
        ) from None


def tokenizer_dir_of(checkpoint: Path, manifest: Manifest, folder: Path) -> Path:
    """A folder with the tokenizer's files: those of the checkpoint, verified, or else those of the run's data set."""
    if manifest.attachments:
        for attachment in manifest.attachments:
            content = read_attachment(LocalFolder(checkpoint), attachment)
            safe_path(folder, attachment.plain_name).write_bytes(content)
        return folder
    try:
        return tokenizer_of_data_set(checkpoint, manifest, folder)
    except (ConfigError, DataError) as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint} carries no tokenizer, because an earlier version or an import made it, and "
            f"the data set of its run is not available: {error}; keep it at RUN/checkpoints and run the command where "
            "the data set is"
        ) from None
