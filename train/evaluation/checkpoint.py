"""Evaluates a trained model on validation rows: the mean loss, overall and of each data source.

`evaluate_rows` takes any model and any batches. `evaluate_checkpoint` evaluates a checkpoint as its run did: the same
rows, in the same precision, so it finds the validation loss that the run logged.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.stream.batch import Batch
from data_pipeline.stream.stream import Stream, open_stream
from data_pipeline.tokenizers.token_bytes import bytes_of_tokens
from data_pipeline.tokenizers.tokenizer import load_tokenizer
from parallel.bootstrap import choose_device
from parallel.engines.precision import DTYPES, working_weights
from train.checkpoint.format.manifest import Manifest
from train.config import Recipe
from train.config_file import load_recipe, recipe_from
from train.device_batch import loss_by_source, to_device
from train.errors import ConfigError
from train.evaluation.answering import LocalModel
from train.evaluation.losses import Losses
from train.evaluation.tasks import Results, evaluate_tasks, load_tasks
from train.evaluation.validation import counted, losses_of
from train.export.carried_tokenizer import check_tokenizer, ids_hash
from train.export.earlier_tokenizer import check_recorded
from train.export.trained_model import load_model, tokenizer_dir_of
from train.model.gpt import GPT
from train.run_folder import run_of_checkpoint

ALL = 1 << 60
"""More sequences than any data set has."""
SETTINGS = ("data", "train.eval_sequences", "train.micro_batch_size", "parallel.device", "parallel.precision")
"""What overrides may change. The model is the checkpoint's."""


@dataclass(frozen=True)
class Evaluation:
    """The result for a checkpoint."""

    checkpoint: Path
    step: int
    logged: float | None
    """The validation loss that the run found at this step; None if it did not evaluate there."""
    source_names: tuple[str, ...]
    losses: Losses


@torch.no_grad()
def evaluate_rows(
    model: GPT,
    batches: Iterable[Batch],
    n_sources: int,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    token_bytes: NDArray[np.int64] | None = None,
    advance: Callable[[float], None] = lambda _: None,
) -> Losses:
    """The losses of a model that is on the device, on all batches. It computes in `dtype`.

    `token_bytes`: bytes of text by token id, if known. `advance` gets the number of sequences of each batch."""
    loss_fn = loss_by_source(n_sources)
    losses_S, counts = torch.zeros(n_sources, dtype=torch.float64), torch.zeros(2, n_sources, dtype=torch.float64)
    with working_weights(model, dtype):
        for batch in batches:
            losses_S += loss_fn(model, to_device(batch, device)).sums[:n_sources].double().cpu()
            counts += counted(batch, n_sources, token_bytes)
            advance(len(batch.tokens_BT))
    totals = torch.cat((losses_S, counts.flatten())).tolist()
    return losses_of(totals, n_sources, known_bytes=token_bytes is not None)


def evaluate_checkpoint(
    path: Path,
    data: Sequence[str],
    overrides: Sequence[str],
    advance: Callable[[float], None],
    average: bool = False,
) -> Evaluation:
    """Evaluate a checkpoint, or the newest of a run, on the first `train.eval_sequences` rows (0: all of them).

    `data` are data sets to use in place of the recipe's. `average`: the average of the weights in their place.
    CheckpointError, ConfigError or DataError if the checkpoint or the rows cannot be read, or if the data were built
    with another tokenizer."""
    checkpoint, manifest, model = load_model(path, average)
    recipe = _recipe_of(checkpoint, manifest, data, overrides)
    device, n_sources = choose_device(recipe.parallel.device, 0), len(recipe.data.sources)
    with _open_rows(recipe, model.config.seq_len) as stream:
        _check_tokenizer(checkpoint, manifest, recipe.data, stream.tokenizer_dir)
        batches = stream.validation(
            sequences=recipe.train.eval_sequences or ALL,
            micro_batch_size=recipe.train.micro_batch_size,
            rank=0,
            world_size=1,
        )
        dtype = DTYPES[recipe.parallel.precision]
        losses = evaluate_rows(
            model.to(device),
            batches,
            n_sources,
            device=device,
            dtype=dtype,
            token_bytes=bytes_of_tokens(stream.tokenizer_dir),
            advance=advance,
        )
        logged = None if average else manifest.validation_loss
        return Evaluation(checkpoint, manifest.step, logged, stream.source_names, losses)


def evaluate_checkpoint_on_tasks(
    path: Path,
    wanted: Sequence[str],
    overrides: Sequence[str],
    advance: Callable[[float], None],
    *,
    limit: int | None,
    batch_size: int | None,
    average: bool,
) -> tuple[Path, int, Results]:
    """Evaluate a checkpoint, or the newest of a run, on tasks: its folder, its step and the results.

    It computes in the recipe's precision, `batch_size` texts at a time (None: the micro batch). CheckpointError or
    ConfigError if the checkpoint or a task cannot be read."""
    tasks = load_tasks(wanted)
    checkpoint, manifest, model = load_model(path, average)
    recipe = _recipe_of(checkpoint, manifest, (), overrides)
    with TemporaryDirectory(prefix="keepstep-tokenizer-") as folder:
        tokenizer = load_tokenizer(tokenizer_dir_of(checkpoint, manifest, Path(folder)))
    device = choose_device(recipe.parallel.device, 0)
    answering = LocalModel(
        model.to(device),
        min(tokenizer.vocab_size, model.config.vocab_size),
        device,
        DTYPES[recipe.parallel.precision],
        batch_size or recipe.train.micro_batch_size,
        advance,
    )
    return checkpoint, manifest.step, evaluate_tasks(answering, tokenizer, model.config.seq_len, tasks, limit)


def _open_rows(recipe: Recipe, seq_len: int) -> Stream:
    """The data of the recipe. DataError if they cannot be read, or if they have no validation rows."""
    try:
        stream = open_stream(recipe.data, seq_len=seq_len)
    except DataError as error:
        raise DataError(f"{error}; if the data set was moved, name its new place: --data FOLDER") from None
    if not stream.has_validation:
        stream.close()
        where = ", ".join(source.path for source in recipe.data.sources)
        raise DataError(
            f"{where} has no validation rows, so there is nothing to evaluate on; name a data set that was built with "
            "--validation-share or --validation: --data FOLDER"
        )
    return stream


def _recipe_of(checkpoint: Path, manifest: Manifest, data: Sequence[str], overrides: Sequence[str]) -> Recipe:
    """The recipe of the checkpoint, or of its run where the checkpoint has none, with other data and settings."""
    for name in (override.removeprefix("--").partition("=")[0] for override in overrides):
        if not any(name == setting or name.startswith(f"{setting}.") for setting in SETTINGS):
            raise ConfigError(f"{name} does not change an evaluation; settings that do: {', '.join(SETTINGS)}")
    if manifest.recipe is None:
        tree: dict[str, Any] = load_recipe(run_of_checkpoint(checkpoint).recipe).model_dump(mode="json")
    else:
        tree = deepcopy(manifest.recipe)
    if data:
        sources = {"sources": [{"path": path} for path in data], "weight_changes": []}
        tree = {**tree, "data": {**tree["data"], **sources}}
    return recipe_from(tree, overrides)


def _check_tokenizer(checkpoint: Path, manifest: Manifest, data: DataConfig, data_tokenizer: Path) -> None:
    """CheckpointError or DataError if the data were built with another tokenizer than the model was trained with."""
    if not manifest.attachments:  # an earlier version saved it
        dataset = DataSet(data.sources[0].path, data.sources[0].mirror)
        check_recorded(dataset, manifest)
        dataset.close()
        return
    with TemporaryDirectory(prefix="keepstep-tokenizer-") as folder:
        ours = load_tokenizer(tokenizer_dir_of(checkpoint, manifest, Path(folder)))
        check_tokenizer(ids_hash(ours), data_tokenizer, str(checkpoint))
