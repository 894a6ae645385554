"""Finds the tokenizer of a checkpoint that carries none, because an earlier version saved it."""

from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.tokenizers.tokenizer import TOKENIZER_FILES
from data_pipeline.untrusted import safe_path
from train.checkpoint.format.manifest import Manifest
from train.config_file import load_recipe
from train.run_folder import run_of_checkpoint


def tokenizer_of_data_set(checkpoint: Path, manifest: Manifest, folder: Path) -> Path:
    """Copy the tokenizer of the data set that the run's recipe.yaml names into `folder`; returns the folder.

    DataError if the data set is missing, or if its tokenizer is not the one that the checkpoint was trained with."""
    source = load_recipe(run_of_checkpoint(checkpoint).recipe).data.sources[0]
    dataset = DataSet(source.path, source.mirror)
    try:
        check_recorded(dataset, manifest)
        for name, content in dataset.tokenizer_files().items():
            safe_path(folder, name, TOKENIZER_FILES).write_bytes(content)
    finally:
        dataset.close()
    return folder


def check_recorded(dataset: DataSet, manifest: Manifest) -> None:
    """DataError if the checkpoint records another tokenizer than the data set's. A later start may have changed it."""
    recorded = [source.get("tokenizer") for state in manifest.rank_states for source in state.get("sources", ())[:1]]
    if recorded and recorded[0] is not None and recorded[0] != dataset.manifest.tokenizer:
        raise DataError(
            f"{dataset.address} has another tokenizer than the checkpoint was trained with "
            f"({dataset.manifest.tokenizer} and {recorded[0]}); set data.sources in the run's recipe.yaml to the data "
            "set of the training"
        )
