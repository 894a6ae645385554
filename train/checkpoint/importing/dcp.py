"""Reads a folder of torch.distributed.checkpoint, such as torchtitan's: weights and AdamW's moments.

The folder's `.metadata` is a pickle. It is read by an unpickler that knows DCP's own classes of plain values alone, so
it runs no code: any other name in it is refused. torch reads the tensors themselves with `weights_only`.
"""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from data_pipeline.untrusted import read_file, safe_path
from train.checkpoint.importing.source import ADAM_STATE, Source
from train.errors import CheckpointError
from train.model.names import plain_name

OPTIMIZER = ("optimizer", "optim")
NOT_MODEL = ("lr_scheduler", "lr_schedulers", "scheduler", "train_state", "dataloader", "rng_state")
"""First parts of the names of what is neither model nor optimizer."""


_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    _METADATA: {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *_DTYPES},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""Names that a `.metadata` may have, by module: classes that only hold values."""


class _Unpickler(pickle.Unpickler):
    """Reads the values of known classes. UnpicklingError for any other name, before anything of it runs."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name."""
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f".metadata names {module[:100]}.{name[:100]}, which is not a class of DCP")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """Reads a folder whose metadata cannot run code and whose files are in the folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The folder's metadata."""
        metadata = _Unpickler(io.BytesIO(read_file(Path(self.path) / ".metadata"))).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError(".metadata has no metadata of DCP")
        for info in metadata.storage_data.values():
            safe_path(Path(self.path), info.relative_path)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read(folder: Path) -> Source:
    """Weights and moments, by the names of the model that was saved."""
    if not (folder / ".metadata").is_file():
        raise CheckpointError(
            f"{folder} has no file .metadata; name the folder that torch.distributed.checkpoint wrote"
        )
    reader = _Reader(folder)
    entries = reader.read_metadata().state_dict_metadata
    found = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    _check_sizes(folder, found)
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found.items()
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return sort_by_kind(tensors)


def _check_sizes(folder: Path, entries: Mapping[str, TensorStorageMetadata]) -> None:
    """CheckpointError if the tensors are larger than the files, before memory is taken for them."""
    stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    stated = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in entries.values())
    if stated > stored or any(size < 0 for entry in entries.values() for size in entry.size):
        raise CheckpointError(
            f"{folder} states {stated:,} bytes of tensors, but its files have {stored:,}; it is damaged or incomplete"
        )


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
