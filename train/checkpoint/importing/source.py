"""What a reader of another system's checkpoint returns."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from train.checkpoint.importing.config_json import Stated
from train.errors import CheckpointError

ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")
"""What torch and DeepSpeed call the state of Adam and AdamW."""
MAX_STEP = 10**9
"""Largest step that is believed."""


@dataclass
class Source:
    """The tensors of a checkpoint of another system, by parameter names that `names.translate` knows."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """The optimizer's state by its name (such as `exp_avg`), then by parameter name. Empty if there is none."""
    stated: Stated | None = None
    """What the source states of its model; None if only its tensors are known."""
    tokenizer: dict[str, bytes] = field(default_factory=dict)
    """The files of its tokenizer by name; empty if it has none."""

    def add_state(self, kind: str, parameter: str, tensor: Tensor) -> None:
        """Add one tensor of the optimizer's state, such as a parameter's `exp_avg`."""
        self.optimizer.setdefault(kind, {})[parameter] = tensor

    @property
    def step(self) -> int:
        """Optimizer steps finished; 0 if the checkpoint does not record them. CheckpointError if it is no step."""
        found = self.optimizer.get("step", {})
        steps = {name: float(tensor) if tensor.numel() == 1 else math.nan for name, tensor in found.items()}
        for name, step in steps.items():
            if not (math.isfinite(step) and step == int(step) and 0 <= step <= MAX_STEP):
                raise CheckpointError(
                    f"the source's optimizer has step {step:g} for {name}; a step is a whole number from 0 to "
                    f"{MAX_STEP}; correct the source, or import its weights alone"
                )
        return int(max(steps.values(), default=0))
