"""The interface between the training loop and an engine.

An engine decides where parameters, gradients and optimizer state are stored and what moves between ranks. The loop
decides everything else: gradient accumulation, learning rate, clipping bound, when to save.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Size, Tensor, nn

from parallel.fragments import FlatFragment
from parallel.optimizer import EngineOptimizer


def no_limit() -> float:
    """The norm limit that accepts every finite gradient norm."""
    return math.inf


class BatchLoss(NamedTuple):
    """The loss of one micro batch, with S data sources and M metrics of the model."""

    objective: Tensor
    """What is differentiated: the loss in nats, summed (not averaged) over the micro batch, plus auxiliary losses.
    Shape ()."""
    sums: Tensor
    """What is reported: the summed loss in nats by data source, then the sums of the model's metrics. Shape
    (R,) = (S + M,), fp32."""


LossFn = Callable[[nn.Module, Any], BatchLoss]
"""`loss_fn(model, batch)`: the loss of one micro batch."""

CheckpointTensor = Tensor | FlatFragment
"""A plain tensor (the same on all ranks of the engine), a DTensor, or a flat fragment of a row-major tensor."""


@dataclass(frozen=True)
class Trainable:
    """What an engine is built from. Nothing here depends on the layout."""

    build: Callable[[], nn.Module]
    """Builds the model on the current default device, which may be `meta`. Its blocks are `model.layers`, an
    `nn.ModuleDict` with the keys "0", "1", ..."""
    initial_value: Callable[[str, Size], Tensor]
    """The whole fp32 initial value of a parameter by its plain name, on CPU: the same bits in every layout."""
    optimizer: Callable[[nn.Module], EngineOptimizer]
    """Builds the optimizer over the module's parameters as they are after wrapping, grouped by name."""


class Engine(Protocol):
    """A model with its optimizer, spread over the ranks."""

    def forward_backward(self, micro_batches: Sequence[Any], loss_fn: LossFn, scale: float) -> Tensor:
        """Accumulate gradients of `objective * scale` over the micro batches of one step. Collective.

        Gradients are averaged over data-parallel ranks, so the loop passes `data_parallel_size / global_tokens`.
        Returns this rank's `sums`, added over the micro batches. Shape (R,), fp32, detached, on the device."""
        ...

    def step(self, lr: float, max_grad_norm: float, norm_limit: Callable[[], float] = no_limit) -> float:
        """Clip gradients to the global norm, update the weights, zero the gradients. Collective.

        Returns the global gradient norm before clipping, the same on every rank. If it is not finite, or above
        `norm_limit()`, weights and optimizer state stay unchanged. `norm_limit` is called when all work up to the norm
        has been queued on the device, so it may wait for the losses. It is not called if fp16 has overflowed."""
        ...

    def evaluate(self, batch: Any, loss_fn: LossFn) -> Tensor:
        """This rank's `sums` without gradients and dropout. Shape (R,), fp32. Collective."""
        ...

    def state(self) -> dict[str, CheckpointTensor]:
        """Views of this rank's shards: `model.<name>` (fp32 masters) and `optim.<name>.<state name>`.

        State names are those of `EngineOptimizer.new_state`. The optimizer state exists from the start."""
        ...

    def refresh_working_weights(self) -> None:
        """Copy the masters into the working weights, after `state()` was filled in place. Collective."""
        ...

    def replicated_tensors(self) -> dict[str, Tensor]:
        """Tensors that other ranks may hold replicas of.

        A plain tensor has a replica on every rank. A DTensor's part has replicas on the ranks that differ only along
        axes over which it is replicated."""
        ...

    def close(self) -> None:
        """Release what the engine holds. Not collective."""
        ...
