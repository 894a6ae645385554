"""Writes a checkpoint as a universal folder of DeepSpeed, one tensor in memory at a time.

`latest_universal` names the folder of the step. In it, `zero/NAME` has the fp32 weight and Adam's moments of a
parameter as tensors, and its step. The other files have what DeepSpeed's engine asks for besides.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from train.checkpoint.conversion.stored_tensors import StoredTensors
from train.checkpoint.stores.steps import step_name

GROUPS = 64
"""Parameter groups that an engine may have. The file has an empty entry for each, so the engine's settings stay."""


def write(stored: StoredTensors, parameters: dict[str, dict[str, str]], folder: Path) -> None:
    """Write the tensors to a new folder; `parameters`: name in the checkpoint by parameter, then by kind."""
    step = stored.manifest.step
    (folder / "latest_universal").write_text(step_name(step))
    zero = folder / step_name(step) / "zero"
    zero.mkdir(parents=True)
    for parameter, kinds in parameters.items():
        (zero / parameter).mkdir()
        for kind, name in kinds.items():
            tensor = stored.whole(name)
            content: Any = tensor if kind == "step" else {"param": tensor.float()}
            _save(content, zero / parameter / f"{kind}.pt")
    engine = {"ds_version": version("deepspeed")}
    facts = {"global_steps": step, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
    for prefix in ("", "zero_pp_rank_0_"):  # ZeRO-3 looks for the longer name
        states = {"module": {}, **facts, **engine, "buffer_names": [], "param_shapes": []}
        _save(states, folder / step_name(step) / f"{prefix}mp_rank_00_model_states.pt")
    third_stage = {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": [{}]}
    optimizer = {**engine, "param_groups": [{} for _ in range(GROUPS)], "optimizer_state_dict": third_stage}
    _save(optimizer, zero / "optimizer_state.pt")


def _save(content: Any, path: Path) -> None:
    """Pickle to an open file: a full disk is then an OSError, and not one of torch's own."""
    with path.open("wb") as file:
        torch.save(content, file)
