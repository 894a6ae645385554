"""The interface between the training loop and an engine.

An engine decides where parameters, gradients and optimizer state are stored and what moves between ranks. The loop
decides everything else: gradient accumulation, learning rate, clipping bound, when to save.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from parallel.fragments import FlatFragment
from parallel.optimizer import EngineOptimizer


def no_limit(_totals: list[float]) -> float:
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


NormLimit = Callable[[list[float]], float]
"""`norm_limit(totals)`: the gradient norm above which a step must change nothing, given the totals of its values."""

LossFn = Callable[[nn.Module, Any], BatchLoss]
"""`loss_fn(model, batch)`: the loss of one micro batch."""

CheckpointTensor = Tensor | FlatFragment
"""A plain tensor (the same on all ranks of the engine), a DTensor, or a flat fragment of a row-major tensor."""


InitialValue = Callable[[str, Tensor], Tensor]
"""`initial_value(name, pairs)`: fp32 initial values of a parameter, by its plain name. For each pair p: those of its
row-major elements 2p and 2p + 1, side by side, so the last dimension of the result is twice as long. `pairs` is int64,
contiguous, and may be overwritten. The values are on its device."""


@dataclass(frozen=True)
class Trainable:
    """What an engine is built from. Nothing here depends on the layout."""

    build: Callable[[], nn.Module]
    """Builds the model on the current default device, which may be `meta`. Its blocks are `model.layers`, an
    `nn.ModuleDict` with the keys "0", "1", ..."""
    initial_value: InitialValue
    """The initial values: the same bits in every layout and on every device."""
    optimizer: Callable[[nn.Module], EngineOptimizer]
    """Builds the optimizer over the module's parameters as they are after wrapping, grouped by name."""


class Engine(Protocol):
    """A model with its optimizer, spread over the ranks."""

    def draw_initial_values(self, initial_value: InitialValue, alive: Callable[[], None] = lambda: None) -> None:
        """Give this rank's weights their initial values. `alive` is called after each block of them. Collective."""
        ...

    def forward_backward(self, micro_batches: Sequence[Any], loss_fn: LossFn, scale: float) -> Tensor:
        """Accumulate gradients of `objective * scale` over the micro batches of one step. Collective.

        Gradients are averaged over data-parallel ranks, so the loop passes `data_parallel_size / global_tokens`.
        Returns this rank's `sums`, added over the micro batches. Shape (R,), fp32, detached, on the device."""
        ...

    def step(
        self, lr: float, max_grad_norm: float, norm_limit: NormLimit = no_limit, values: Tensor | None = None
    ) -> float:
        """Clip gradients to the global norm, update the weights, zero the gradients. Collective.

        Returns the global gradient norm before clipping, the same on every rank. If it is not finite, or above the norm
        limit, weights and optimizer state stay unchanged. `values` of this rank, a vector in fp64 on the device, are
        added up over all ranks, where possible in the same collective as the norm. `norm_limit` is called with the
        totals on every rank, at least once, before anything changes."""
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
