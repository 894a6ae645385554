"""The interface between the training loop and an engine.

An engine decides where parameters, gradients and optimizer state live and what moves between ranks. The loop decides
everything else: accumulation, learning rate, clipping bound, when to save.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Size, Tensor, nn
from torch.optim import Optimizer

from parallel.fragments import FlatFragment


def no_limit() -> float:
    """Any gradient norm that is finite."""
    return math.inf


LossFn = Callable[[nn.Module, Any], Tensor]
"""`loss_fn(model, batch)`: summed (not mean) loss in nats, one entry per data source, shape (S,)."""

CheckpointTensor = Tensor | FlatFragment
"""A plain tensor (the same on all ranks of the engine), a DTensor, or a flat fragment of a row-major tensor."""


@dataclass(frozen=True)
class Trainable:
    """What an engine is built from. Nothing here depends on the layout."""

    build: Callable[[], nn.Module]
    """The model on the current default device (engines call it under `torch.device("meta")`). Its blocks are
    `model.layers`, an `nn.ModuleDict` keyed "0", "1", ..."""
    initial_value: Callable[[str, Size], Tensor]
    """The whole fp32 initial value of a parameter by its plain name, on CPU: the same bits whatever the layout."""
    optimizer: Callable[[nn.Module], Optimizer]
    """The optimizer over the module's parameters as they stand after wrapping, grouped by name."""


class Engine(Protocol):
    def forward_backward(self, micro_batches: Sequence[Any], loss_fn: LossFn, scale: float) -> Tensor:
        """Accumulate gradients of `loss_fn(...).sum() * scale` over the micro batches of one step. Collective.

        Gradients are averaged over data-parallel ranks, so the loop passes `data_parallel_size / global_tokens`.
        Returns this rank's summed loss by source over the micro batches, shape (S,), fp32, detached, on the device."""
        ...

    def step(self, lr: float, max_grad_norm: float, norm_limit: Callable[[], float] = no_limit) -> float:
        """Clip to the global norm, update, zero the gradients. Collective.

        Returns the global gradient norm before clipping, the same on every rank. If it is not finite, or above
        `norm_limit()`, neither weights nor optimizer state have moved. The limit is asked for when all work up to the
        norm is on its way to the device, so that it may wait for the losses; not at all if fp16 has overflowed."""
        ...

    def evaluate(self, batch: Any, loss_fn: LossFn) -> Tensor:
        """This rank's summed loss by source without gradients, dropout off, shape (S,). Collective."""
        ...

    def state(self) -> dict[str, CheckpointTensor]:
        """Views of this rank's shards: `model.<name>` (fp32 masters) and `optim.<name>.{exp_avg,exp_avg_sq,step}`.

        Moments exist from the start (zeros). `step` is a zero-dimensional fp32 tensor."""
        ...

    def refresh_working_weights(self) -> None:
        """Refresh working copies after the tensors of `state()` were filled in place. Collective."""
        ...

    def replicated_tensors(self) -> dict[str, Tensor]:
        """What other ranks may hold copies of: a plain tensor is the same on all ranks, a DTensor's part on those that
        differ only along axes over which it is replicated."""
        ...

    def close(self) -> None:
        """Release what the engine holds. Not collective."""
        ...
