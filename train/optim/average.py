"""The exponential moving average of the weights (Polyak and Juditsky 1992; Izmailov et al. 2018 compare its relatives).

The average of a parameter is a tensor of the optimizer's state, `optim.NAME.average` in checkpoints. So every engine
cuts it like the parameter, a skipped step leaves it alone, and a roll-back restores it.

After step t it becomes d x average + (1 - d) x weights, with d = min(ema_decay, (t - 1) / (t + 9)). So it is the
weights themselves after step 1, and it follows them over the last tenth of the run until the decay is reached: the
initial values do not stay in it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallel.engine import CheckpointTensor
from parallel.fragments import FlatFragment
from parallel.sharded import local_part

AVERAGE = "average"
"""Name of the average among the tensors of a parameter's state."""


def average_of(parameter: Tensor, ema_decay: float | None) -> dict[str, Tensor]:
    """The average before the first step, by its name; empty if no average is kept."""
    return {} if ema_decay is None else {AVERAGE: torch.zeros_like(parameter)}


def share_of_new(step: int, ema_decay: float) -> float:
    """The share of the present weights in the average after optimizer step `step`, counted from 1."""
    return 1.0 - min(ema_decay, (step - 1) / (step + 9))


def steps_done(optimizer: Optimizer) -> int:
    """Optimizer steps of the parameters that have a gradient; 0 if none has one. Waits for the device."""
    moved = _moved(optimizer)
    return int(optimizer.state[moved[0]]["step"].item()) if moved else 0


@torch.no_grad()
def update_averages(optimizer: Optimizer, share: float) -> None:
    """Move the average of each parameter that has a gradient by this share of the way to the parameter."""
    if moved := _moved(optimizer):
        averages = [local_part(optimizer.state[parameter][AVERAGE]) for parameter in moved]
        torch._foreach_lerp_(averages, [local_part(parameter) for parameter in moved], share)


def _moved(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that a step moves. DeepSpeed calls a step for each of its flat tensors."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def average_name(name: str) -> str:
    """The name in a state of the average of a weight `model.NAME`."""
    return f"optim.{name.removeprefix('model.')}.{AVERAGE}"


def is_average(name: str) -> bool:
    """Whether a tensor of a state is an average of weights."""
    return name.startswith("optim.") and name.endswith(f".{AVERAGE}")


def pairs(state: Mapping[str, CheckpointTensor]) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of each weight and of its average. Empty if the state has no averages."""
    names = [name for name in state if name.startswith("model.") and average_name(name) in state]
    return [(_held(state[name]), _held(state[average_name(name)])) for name in names]


def _held(tensor: CheckpointTensor) -> Tensor:
    return tensor.flat if isinstance(tensor, FlatFragment) else local_part(tensor)


@torch.no_grad()
def start_averages(state: Mapping[str, CheckpointTensor]) -> None:
    """Set each average to the present weight."""
    for weight, average in pairs(state):
        average.copy_(weight)


@torch.no_grad()
def swap_averages(state: Mapping[str, CheckpointTensor]) -> None:
    """Exchange the values of each weight and its average, bit for bit. A second call undoes it."""
    for weight, average in pairs(state):
        kept = weight.clone()
        weight.copy_(average)
        average.copy_(kept)
