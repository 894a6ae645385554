"""The kinds of checkpoints that `keepstep checkpoint import` reads. No torch, so that the command line answers fast.

To add a kind, write its reader beside this file and add a line to KINDS (docs/extending.md).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint of another system."""

    reader: str
    """Module with a function `read(folder: Path) -> Source`. It raises CheckpointError for a folder it cannot read."""
    summary: str
    """What is read, as the command line shows it."""
    unpickles: bool
    """True if reading unpickles files without restriction. That can run any code, so the user must pass --trust."""


_HERE = "train.checkpoint.importing"
KINDS = {
    "keepstep": Kind(f"{_HERE}.keepstep", "a Keepstep run folder or checkpoint: weights", unpickles=False),
    "dcp": Kind(f"{_HERE}.dcp", "a torch DCP folder, such as torchtitan's: weights and moments", unpickles=False),
    "deepspeed": Kind(f"{_HERE}.deepspeed_zero", "a DeepSpeed ZeRO folder: fp32 weights", unpickles=True),
    "universal": Kind(
        f"{_HERE}.deepspeed_universal", "a DeepSpeed universal folder: weights and moments", unpickles=True
    ),
    "huggingface": Kind(
        f"{_HERE}.hugging_face",
        "a folder of a Llama, Mistral, Qwen3 or GPT-2 model: config.json and weights",
        unpickles=False,
    ),
}
