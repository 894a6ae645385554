"""Reads a folder of torch.distributed.checkpoint, such as torchtitan's: weights and AdamW's moments.

torch unpickles the folder's `.metadata`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from train.checkpoint.importing.source import ADAM_STATE, Source
from train.errors import CheckpointError
from train.model.names import plain_name

OPTIMIZER = ("optimizer", "optim")
NOT_MODEL = ("lr_scheduler", "lr_schedulers", "scheduler", "train_state", "dataloader", "rng_state")
"""First parts of the names of what is neither model nor optimizer."""


def read(folder: Path) -> Source:
    """Weights and moments, by the names of the model that was saved."""
    if not (folder / ".metadata").is_file():
        raise CheckpointError(
            f"{folder} has no file .metadata; name the folder that torch.distributed.checkpoint wrote"
        )
    reader = dcp.FileSystemReader(folder)
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return sort_by_kind(tensors)


def sort_by_kind(tensors: Mapping[str, Tensor]) -> Source:
    """Weights are `model.NAME` or `NAME`; state is `optimizer.state.NAME.exp_avg`, `optim.NAME.exp_avg` or the like.

    Every tensor that may belong to the model is a weight, so a name that our model lacks is refused later."""
    source = Source()
    for full_name, tensor in tensors.items():
        full_name = plain_name(full_name)
        root, _, name = full_name.partition(".")
        if root in OPTIMIZER:
            parameter, _, kind = name.removeprefix("state.").rpartition(".")
            if parameter and kind in ADAM_STATE:
                source.add_state(kind, parameter, tensor)
        elif root not in NOT_MODEL and tensor.dim() and tensor.is_floating_point():
            source.weights[full_name] = tensor
    return source
