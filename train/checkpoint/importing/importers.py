"""`keepstep checkpoint import`: makes step 0 of a run, or the step it was at, of another system's checkpoint.

| kind        | what is read                                                    | unpickles                        |
| ----------- | --------------------------------------------------------------- | -------------------------------- |
| huggingface | `*.safetensors` of a Llama, Qwen3 or GPT-2 folder: weights      | nothing                          |
| dcp         | a torch DCP folder, such as torchtitan's: weights and moments   | its `.metadata`                  |
| universal   | DeepSpeed's universal folder: weights and moments               | tensors alone (`weights_only`)   |
| deepspeed   | DeepSpeed's ZeRO folder: fp32 weights, through DeepSpeed itself | everything                       |

Whoever wrote a pickle can run code where it is unpickled, so all but the first need `--trust`. One process holds the
whole model: weights and both moments, 12 bytes per parameter. What the source lacks of the optimizer begins at zero.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train.checkpoint.importing.names import translate
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.checkpoint.saved_state import plain_names
from train.config import CheckpointConfig
from train.config_file import load_recipe
from train.errors import CheckpointError
from train.model.config import ModelConfig
from train.model.gpt import GPT

MOMENTS = ("exp_avg", "exp_avg_sq")
Source = dict[str, dict[str, Tensor]]
"""By kind: `weight`, `exp_avg`, `exp_avg_sq`, `step`; each by the source's parameter names."""


def import_checkpoint(kind: str, source: Path, recipe: str, target: str, trust: bool) -> str:
    """The path of the new checkpoint. CheckpointError if the source does not fit the recipe's model."""
    if not source.is_dir():
        raise CheckpointError(f"{source} is no folder")
    if kind != "huggingface" and not trust:
        raise CheckpointError(
            f"a {kind} checkpoint is unpickled, which can run any code that its author put there; "
            "add --trust if you know where it comes from"
        )
    config = load_recipe(recipe).model
    readers: dict[str, Callable[[Path], Source]] = {
        "huggingface": _read_huggingface,
        "dcp": _read_dcp,
        "universal": _read_universal,
        "deepspeed": _read_deepspeed,
    }
    read = readers[kind](source)
    step = max((int(tensor) for tensor in read.pop("step").values()), default=0)
    state = _state({name: translate(tensors, config) for name, tensors in read.items()}, step, config, source)
    return _save(state, step, target, imported={"kind": kind, "source": str(source.resolve())})


def _save(state: dict[str, Tensor], step: int, target: str, imported: dict[str, str]) -> str:
    events: list[tuple[str, dict[str, Any]]] = []
    manager = CheckpointManager(
        target, CheckpointConfig(background=False, keep_last=2**31), {}, lambda kind, **d: events.append((kind, d))
    )
    manager.save(SavedProgress(step, 0, extra={"skipped": 0, "guard": None, "imported": imported}), state, {})
    manager.close()
    if events[-1][0] != "saved":
        raise CheckpointError(f"the imported checkpoint could not be saved: {events[-1][1]['error']}")
    return f"{target}/step-{step:08d}"


def _state(read: Source, step: int, config: ModelConfig, source: Path) -> dict[str, Tensor]:
    """The engines' names, fp32, complete."""
    with torch.device("meta"):
        wanted = {name: parameter.shape for name, parameter in GPT(config).named_parameters()}
    weights = dict(read["weight"])
    if "head.weight" not in wanted:
        weights.pop("head.weight", None)  # tied
    missing, unexpected = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"{source} is not of this recipe's model: {len(missing)} missing ({', '.join(missing[:5])}), "
            f"{len(unexpected)} unexpected ({', '.join(unexpected[:5])})"
        )
    state: dict[str, Tensor] = {}
    for name, shape in wanted.items():
        state[f"model.{name}"] = _fitted(name, weights[name], shape)
        for moment in MOMENTS:
            found = read[moment].get(name)
            state[f"optim.{name}.{moment}"] = torch.zeros(shape) if found is None else _fitted(name, found, shape)
        state[f"optim.{name}.step"] = torch.tensor(float(step))
    return state


def _fitted(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    """fp32; rows of padding are added to, or taken from, embedding and head."""
    if tensor.shape != shape and name in ("embed.weight", "head.weight") and tensor.shape[1:] == shape[1:]:
        padded = torch.zeros(shape)
        rows = min(shape[0], tensor.shape[0])
        padded[:rows] = tensor[:rows]
        return padded
    if tensor.dim() == 1 and tensor.numel() == shape.numel():  # ZeRO-3 keeps everything flat
        tensor = tensor.view(shape)
    if tensor.shape != shape:
        raise CheckpointError(f"{name} is {tuple(tensor.shape)} there, {tuple(shape)} in this recipe's model")
    return tensor.float().contiguous()


def _empty() -> Source:
    return {"weight": {}, "step": {}} | {moment: {} for moment in MOMENTS}


def _read_huggingface(folder: Path) -> Source:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors; save the model with safe_serialization=True")
    source = _empty()
    for file in files:
        source["weight"] |= load_file(file)
    return source


def _read_dcp(folder: Path) -> Source:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(folder)
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return _sorted_by_kind(tensors)


def _sorted_by_kind(tensors: Mapping[str, Tensor]) -> Source:
    """DCP's names: `model.NAME` or `NAME`; `optimizer.state.NAME.exp_avg` or, flattened otherwise, `state.NAME...`."""
    source = _empty()
    for full, tensor in plain_names(tensors).items():
        name = full.removeprefix("optimizer.").removeprefix("optim.")
        base, _, kind = name.removeprefix("state.").rpartition(".")
        if kind in (*MOMENTS, "step") and name != "step":
            source[kind][base] = tensor
        elif kind in ("weight", "bias") and name == full:
            source["weight"][name] = tensor
    return source


def _read_universal(folder: Path) -> Source:
    if (latest := folder / "latest_universal").is_file():
        folder = folder / latest.read_text().strip()
    parameters = folder / "zero"
    if not parameters.is_dir():
        raise CheckpointError(f"{folder} has no folder 'zero': make it with DeepSpeed's ds_to_universal.py")
    source = _empty()
    for entry in sorted(parameters.iterdir()):
        for kind, file in (("weight", "fp32"), *((moment, moment) for moment in MOMENTS), ("step", "step")):
            if (path := entry / f"{file}.pt").is_file():
                loaded = torch.load(path, weights_only=True)
                value = loaded["param"] if isinstance(loaded, dict) else loaded
                source[kind][_plain(entry.name)] = torch.as_tensor(value)
    return source


def _read_deepspeed(folder: Path) -> Source:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    source = _empty()
    weights = dict(get_fp32_state_dict_from_zero_checkpoint(str(folder)) or {})
    source["weight"] = {_plain(name): tensor for name, tensor in weights.items()}
    return source


def _plain(name: str) -> str:
    return next(iter(plain_names({name: torch.empty(0)})))
