"""Reads the fp32 weights of a ZeRO checkpoint of DeepSpeed, with DeepSpeed's own code, which unpickles all files."""

from pathlib import Path

from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from data_pipeline.untrusted import check_name, read_file
from train.checkpoint.importing.source import Source
from train.errors import CheckpointError
from train.model.names import plain_name


def read(folder: Path) -> Source:
    """The weights, by the names of the model that was saved."""
    if not (folder / "latest").is_file():
        raise CheckpointError(
            f"{folder} has no file 'latest'; name the folder that DeepSpeed's save_checkpoint was given"
        )
    check_name(read_file(folder / "latest").decode().strip())  # DeepSpeed would follow it out of the folder
    weights = dict(get_fp32_state_dict_from_zero_checkpoint(str(folder)) or {})
    return Source(weights={plain_name(name): tensor for name, tensor in weights.items()})
