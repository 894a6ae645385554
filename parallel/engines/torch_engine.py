"""The engine behind `single`, `ddp` and `fsdp2`: a wrapped module and an optimizer.

The three differ in how they wrap the module and in when gradients move between ranks, which their files describe.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parallel.engine import CheckpointTensor, InitialValue, LossFn, NormLimit, no_limit
from parallel.engines.clipping import clip_factor, global_norm
from parallel.engines.graphs import MicroBatchGraph
from parallel.engines.initial import fill_model
from parallel.engines.precision import LossScaler, working_weights
from parallel.optimizer import EngineOptimizer
from parallel.sharded import local_part, plain


class TorchEngine:
    """Implements `parallel.engine.Engine`, which documents the methods."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: EngineOptimizer,
        *,
        device: torch.device,
        called: nn.Module | None = None,
        working_dtype: torch.dtype = torch.float32,
        scaler: LossScaler | None = None,
        exchange: Callable[[bool], AbstractContextManager[None]],
        before_passes: Callable[[], None] = lambda: None,
        graph: MicroBatchGraph | None = None,
        after_evaluation: Callable[[], None] = lambda: None,
        keep_gradients: bool = False,
    ) -> None:
        """Create the optimizer state.

        `called`: the module that the loss function calls; by default the model. `exchange(is_last)`: the context of
        each micro batch, which moves gradients between ranks when they must. `before_passes` is called before the
        passes of a step and of an evaluation, when the weights may have changed. `graph` replays the passes of each
        micro batch. `keep_gradients`: zero gradients in place instead of freeing them."""
        self.model = model
        self.optimizer = optimizer
        self._device = device
        self._called = called or model
        self._working_dtype = working_dtype
        self._scaler = scaler
        self._exchange = exchange
        self._before_passes = before_passes
        self._graph = graph
        self._after_evaluation = after_evaluation
        self._keep_gradients = keep_gradients
        self._parameters = dict(model.named_parameters())
        optimizer.create_state()

    def draw_initial_values(self, initial_value: InitialValue, alive: Callable[[], None] = lambda: None) -> None:
        """See `Engine.draw_initial_values`."""
        fill_model(self.model, initial_value, alive)

    def forward_backward(self, micro_batches: Sequence[Any], loss_fn: LossFn, scale: float) -> Tensor:
        """See `Engine.forward_backward`. Collective."""
        if self._scaler is not None:
            scale *= self._scaler.scale.item()
        self._before_passes()
        graph = self._graph
        if graph is not None:
            passes = partial(self._passes_and_casts, loss_fn)
            return self._sum(micro_batches, lambda batch: graph.run(passes, batch, scale))
        with working_weights(self.model, self._working_dtype):
            return self._sum(micro_batches, lambda batch: self._passes(loss_fn, batch, scale))

    def _sum(self, micro_batches: Sequence[Any], run: Callable[[Any], Tensor]) -> Tensor:
        """Run the passes of each micro batch, and add up what they return."""
        sums: list[Tensor] = []
        for index, batch in enumerate(micro_batches):
            with self._exchange(index == len(micro_batches) - 1):
                sums.append(run(batch))
        return torch.stack(sums).sum(dim=0)

    def _passes(self, loss_fn: LossFn, batch: Any, scale: float | Tensor) -> Tensor:
        """The forward and backward pass of a micro batch; returns its sums."""
        loss = loss_fn(self._called, batch)
        (loss.objective * scale).backward()
        return loss.sums.detach().float()

    def _passes_and_casts(self, loss_fn: LossFn, batch: Any, scale: Tensor) -> Tensor:
        """The same with the casts of the weights, which under a graph are repeated for each micro batch."""
        with working_weights(self.model, self._working_dtype):
            return self._passes(loss_fn, batch, scale)

    @torch.no_grad()
    def step(
        self, lr: float, max_grad_norm: float, norm_limit: NormLimit = no_limit, values: Tensor | None = None
    ) -> float:
        """See `Engine.step`. Collective."""
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        unscale = 1.0 if self._scaler is None else 1.0 / self._scaler.scale.item()
        norm, totals = global_norm(gradients, self._device, values)
        limit, norm = norm_limit(totals), norm * unscale
        if self._scaler is not None:
            self._scaler.update(math.isfinite(norm))
        if math.isfinite(norm) and norm <= limit:
            factor = clip_factor(norm, max_grad_norm) * unscale
            if factor != 1.0:
                torch._foreach_mul_([local_part(gradient) for gradient in gradients], factor)
            self.optimizer.set_lr(lr)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self._keep_gradients)
        return norm

    @torch.no_grad()
    def evaluate(self, batch: Any, loss_fn: LossFn) -> Tensor:
        """See `Engine.evaluate`. Collective."""
        self._called.eval()
        self._before_passes()
        with working_weights(self.model, self._working_dtype):
            sums = loss_fn(self._called, batch).sums.float()
        self._called.train()
        self._after_evaluation()
        return sums

    def state(self) -> dict[str, CheckpointTensor]:
        """See `Engine.state`."""
        state: dict[str, CheckpointTensor] = {}
        for name, parameter in self._parameters.items():
            state[f"model.{name}"] = plain(parameter.detach())
            for key, value in self.optimizer.state[parameter].items():
                state[f"optim.{name}.{key}"] = value
        return state | (self._scaler.state() if self._scaler is not None else {})

    def refresh_working_weights(self) -> None:
        """Do nothing: the parameters are the masters, and each step makes new working copies of them."""

    def replicated_tensors(self) -> dict[str, Tensor]:
        """See `Engine.replicated_tensors`: the whole state."""
        return dict(self.state())

    def close(self) -> None:
        """Do nothing: the engine holds only memory."""


def build_without_values(build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """The model with memory but without initial values. Nobody needs torch's own."""
    with torch.device(device), _WithoutValues():
        return build()


class _WithoutValues(TorchFunctionMode):
    """Makes the functions of `torch.nn.init` do nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
