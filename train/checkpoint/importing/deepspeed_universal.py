"""Reads a universal checkpoint of DeepSpeed: fp32 weights and Adam's moments.

torch unpickles tensors only. A checkpoint of ZeRO-3 has its step in `optimizer_state.pt` alone, unpickled whole.
"""

from pathlib import Path
from typing import Any

import torch

from data_pipeline.untrusted import check_name, read_file
from train.checkpoint.importing.source import ADAM_STATE, Source
from train.errors import CheckpointError
from train.model.names import plain_name


def read(folder: Path) -> Source:
    """Weights and moments, by the names of the model that was saved."""
    if (latest := folder / "latest_universal").is_file():
        folder = folder / check_name(read_file(latest).decode().strip())
    parameters = folder / "zero"
    if not parameters.is_dir():
        raise CheckpointError(f"{folder} has no folder 'zero': make it with DeepSpeed's ds_to_universal.py")
    source = Source()
    for entry in sorted(parameters.iterdir()):
        for kind in ("fp32", *ADAM_STATE):
            if (path := entry / f"{kind}.pt").is_file():
                loaded = torch.load(path, weights_only=True)
                tensor = torch.as_tensor(loaded["param"] if isinstance(loaded, dict) else loaded)
                if kind == "fp32":
                    source.weights[plain_name(entry.name)] = tensor
                else:
                    source.add_state(kind, plain_name(entry.name), tensor)
    common = parameters / "optimizer_state.pt"
    if source.optimizer and "step" not in source.optimizer and common.is_file():
        for step in _steps(torch.load(common, weights_only=False, map_location="cpu")):
            for name in source.weights:
                source.add_state("step", name, torch.as_tensor(step))
    return source


def _steps(state: dict[str, Any]) -> list[Any]:
    """The step of ZeRO-3's optimizer, at most one: torch has it beside the moments, DeepSpeed's Adam in the groups."""
    optimizer = state.get("optimizer_state_dict", {})
    entries = [*optimizer.get("state", {}).values(), *optimizer.get("param_groups", [])]
    return [entry["step"] for entry in entries if "step" in entry][:1]
