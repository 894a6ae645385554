"""Writes the tensors of a checkpoint as a folder of torch.distributed.checkpoint (DCP), one tensor in memory at a time.

Names are those of torch's `get_model_state_dict` under `model` and of `get_optimizer_state_dict`, flattened, under
`optimizer`: `model.NAME` and `optimizer.state.NAME.exp_avg`.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from train.checkpoint.conversion.stored_tensors import StoredTensors


class _Planner(DefaultSavePlanner):
    """Plans with tensors of the meta device and reads each when it is written."""

    def __init__(self, stored: StoredTensors, names: Mapping[str, str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._stored, self._names = stored, names

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor of an item."""
        return self._stored.whole(self._names[write_item.index.fqn])


def write(stored: StoredTensors, names: Mapping[str, str], folder: Path) -> None:
    """Write the tensors `names` (their name in the checkpoint, by the name that they get) to a new folder."""
    state: dict[str, Any] = {
        theirs: torch.empty(stored.shape(ours), dtype=stored.dtype(ours), device="meta")
        for theirs, ours in names.items()
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as `no_dist` asks
            writer = dcp.FileSystemWriter(folder)
            dcp.save(state, storage_writer=writer, planner=_Planner(stored, names), no_dist=True)
    except CheckpointException as error:  # DCP's; it holds what a rank has raised
        raise next(iter(error.failures.values()))[0] from error
