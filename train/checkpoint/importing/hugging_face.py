"""Reads the weights of a Hugging Face folder: `*.safetensors` of a Llama, Mistral, Qwen3 or GPT-2 model.

Unpickles nothing. A folder must leave no doubt which files are the model: the index lists them, or there is one file.
"""

import re
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from data_pipeline.untrusted import UnsafeNameError, check_file, check_name, parse_json, read_file
from train.checkpoint.importing.config_json import CONFIG, read_stated
from train.checkpoint.importing.source import Source
from train.errors import CheckpointError

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


def read(folder: Path) -> Source:
    """The weights, by Hugging Face's names, and what config.json states. CheckpointError if the folder is ambiguous."""
    stated = read_stated(folder)
    if stated is None:
        raise CheckpointError(
            f"{folder} has no {CONFIG} with a model_type, so what its weights compute is unknown; name the folder that "
            "save_pretrained wrote"
        )
    if adapters := sorted(path.name for path in folder.glob("adapter_*")):
        raise CheckpointError(
            f"{folder} has an adapter ({', '.join(adapters)}); merge it into the weights (merge_and_unload) and "
            "save again"
        )
    index = _read_index(folder)
    weights: dict[str, Tensor] = {}
    for name in _model_files(folder, index):
        check_file(folder / name)
        found = load_file(folder / name)
        if index is not None:
            found = {tensor: value for tensor, value in found.items() if index.get(tensor) == name}
        if twice := weights.keys() & found.keys():
            raise CheckpointError(f"{folder}: {min(twice)} is in two files; remove the file that is not the model's")
        weights |= found
    if index is not None and (missing := sorted(index.keys() - weights.keys())):
        raise CheckpointError(f"{folder}: {INDEX} lists {len(missing)} tensors that no file has ({missing[0]})")
    return Source(weights=weights, stated=stated)


def _read_index(folder: Path) -> dict[str, str] | None:
    """File of each tensor by the index; None without an index."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        index = parse_json(read_file(path))["weight_map"]
        names = {str(tensor): check_name(file) for tensor, file in index.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UnsafeNameError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:300]}; download it again") from error
    for name in set(names.values()):
        if "/" in name or not (folder / name).is_file():
            raise CheckpointError(f"{path} names {name!r}, which is not a file of the folder; download it again")
    return names


def _model_files(folder: Path, index: dict[str, str] | None) -> list[str]:
    """Names of the files that hold the model. CheckpointError if that is not certain."""
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if index is not None:
        listed = sorted(set(index.values()))
        if MODEL in present and MODEL not in listed:
            raise CheckpointError(
                f"{folder} has both {MODEL} and {INDEX}, which lists other files; remove the one that is not the model"
            )
        return listed
    if MODEL in present:
        return [MODEL]
    if len(present) == 1 or (present and _is_complete(present)):
        return present
    if not present:
        raise CheckpointError(f"{folder} has no *.safetensors; save the model with safe_serialization=True")
    raise CheckpointError(
        f"{folder} has {len(present)} *.safetensors files ({', '.join(present[:3])}, ...) and no {INDEX} that says "
        "which of them are the model; add the index, or remove the others"
    )


def _is_complete(names: list[str]) -> bool:
    """True if the files are all shards 1 to n of one set, such as `model-00001-of-00002.safetensors`."""
    matches = [SHARD.fullmatch(name) for name in names]
    sets = {(match[1], int(match[3])) for match in matches if match}
    numbers = [int(match[2]) for match in matches if match]
    return len(sets) == 1 and sorted(numbers) == list(range(1, sets.pop()[1] + 1)) and len(numbers) == len(names)
