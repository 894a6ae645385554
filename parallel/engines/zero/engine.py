"""DeepSpeed's ZeRO (Rajbhandari et al. 2020): data parallel, with more and more of the state cut over the ranks.

| cut over N ranks                    | zero1 | zero2 | zero3 |
| ----------------------------------- | ----- | ----- | ----- |
| fp32 weights and optimizer state    | yes   | yes   | yes   |
| gradients                           |       | yes   | yes   |
| working weights                     |       |       | yes   |

docs/parallelism.md lists what moves and the memory formulas, beside those of the other engines.

DeepSpeed is used for nothing else. The loop owns gradient accumulation, the learning rate, the clipping bound and
checkpoints. `setup.py` is the one place where DeepSpeed's configuration is made. The inner optimizer is that of the
other engines, so nothing is compiled at start-up.
"""

import io
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from parallel.bootstrap import Runtime
from parallel.collectives import sum_over_ranks
from parallel.config import ParallelConfig
from parallel.engine import CheckpointTensor, InitialValue, LossFn, NormLimit, Trainable, no_limit
from parallel.engines.blocks import apply_to_blocks
from parallel.engines.initial import HeldPart, fill_parts
from parallel.engines.precision import LossScaler
from parallel.engines.torch_engine import build_without_values
from parallel.engines.zero.setup import bucket_sizes, deepspeed_config, import_deepspeed
from parallel.engines.zero.state import create_state, pieces, refresh_working_weights, state_of
from parallel.mesh import limit_collectives
from parallel.optimizer import EngineOptimizer


def build_zero(config: ParallelConfig, runtime: Runtime, trainable: Trainable) -> "ZeroEngine":
    """The engine `zero1`, `zero2` or `zero3`, with weights that are not set yet. Collective.

    Raises LaunchError if DeepSpeed or the precision is not available."""
    deepspeed = import_deepspeed(config, runtime.device)
    settings = deepspeed_config(config, runtime.device)
    in_parts = deepspeed.zero.Init(config_dict_or_path=settings) if config.engine == "zero3" else nullcontext()
    with in_parts:
        model = build_without_values(trainable.build, runtime.device)
    apply_to_blocks(model, config)
    settings["zero_optimization"] |= bucket_sizes(model)
    if config.engine == "zero3":  # gather a whole block, outside of what activation checkpointing computes again
        deepspeed.utils.set_z3_leaf_modules(model, [type(model.get_submodule("layers.0"))])
    with redirect_stdout(io.StringIO()):  # DeepSpeed prints tables of its memory
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=trainable.optimizer(model), config=settings, dist_init_required=False
        )
    limit_collectives(config.timeout_seconds)  # DeepSpeed has made groups of its own
    return ZeroEngine(engine, model, LossScaler() if config.precision == "fp16" else None)


class ZeroEngine:
    """Implements `parallel.engine.Engine`, which documents the methods."""

    def __init__(self, engine: Any, model: nn.Module, scaler: LossScaler | None) -> None:
        """Create the optimizer state. `engine` is DeepSpeed's. Collective."""
        self._engine = engine
        self._optimizer = engine.optimizer
        self._inner: EngineOptimizer = engine.optimizer.optimizer
        self._scaler = scaler
        self._norm_limit: Callable[[], float] = lambda: math.inf
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._pieces = list(pieces(self._optimizer, names))
        create_state(self._pieces, self._inner)
        self._guard_inner_step()

    def draw_initial_values(self, initial_value: InitialValue, alive: Callable[[], None] = lambda: None) -> None:
        """See `Engine.draw_initial_values`. Collective."""
        parts = [
            HeldPart(piece.name, (piece.shape.numel(),), (piece.start,), piece.of(piece.flat)) for piece in self._pieces
        ]
        fill_parts(parts, initial_value, alive)
        self.refresh_working_weights()

    def _guard_inner_step(self) -> None:
        """Make the inner optimizer skip its step if the gradient norm is above the limit.

        DeepSpeed's step computes the norm, then calls the inner optimizer. This is the only point between the two."""
        update = self._inner.step

        def update_within_limit(*arguments: Any, **options: Any) -> None:
            limit = self._norm_limit()
            if self._norm() <= limit:
                update(*arguments, **options)

        self._inner.step = update_within_limit  # pyright: ignore[reportAttributeAccessIssue]

    def _norm(self) -> float:
        return math.inf if self._optimizer.overflow else float(self._optimizer._global_grad_norm)

    def forward_backward(self, micro_batches: Sequence[Any], loss_fn: LossFn, scale: float) -> Tensor:
        """See `Engine.forward_backward`. Collective."""
        if self._scaler is not None:
            self._optimizer.loss_scaler.cur_scale = self._scaler.scale.item()
        sums: list[Tensor] = []
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            self._engine.set_gradient_accumulation_boundary(is_last)
            loss = loss_fn(self._engine, batch)
            self._engine.backward(loss.objective * scale)
            if not is_last:
                self._engine.step()  # before the boundary it only counts the micro batch
            sums.append(loss.sums.detach().float())
        return torch.stack(sums).sum(dim=0)

    def step(
        self, lr: float, max_grad_norm: float, norm_limit: NormLimit = no_limit, values: Tensor | None = None
    ) -> float:
        """See `Engine.step`. Collective."""
        self._inner.set_lr(lr)
        self._optimizer.clip_grad = max_grad_norm
        totals = None if values is None else sum_over_ranks(values)
        self._norm_limit = cache(lambda: norm_limit([] if totals is None else totals.tolist()))
        self._engine.step()
        self._norm_limit()  # DeepSpeed does not call the inner optimizer if fp16 has overflowed
        norm = self._norm()
        if self._scaler is not None:
            self._scaler.update(math.isfinite(norm))
        return norm

    @torch.no_grad()
    def evaluate(self, batch: Any, loss_fn: LossFn) -> Tensor:
        """See `Engine.evaluate`. Collective."""
        self._engine.eval()
        sums = loss_fn(self._engine, batch).sums.float()
        self._engine.train()
        return sums

    def state(self) -> dict[str, CheckpointTensor]:
        """See `Engine.state`."""
        return state_of(self._pieces, self._inner) | (self._scaler.state() if self._scaler is not None else {})

    def refresh_working_weights(self) -> None:
        """See `Engine.refresh_working_weights`. Collective."""
        refresh_working_weights(self._optimizer)

    def replicated_tensors(self) -> dict[str, Tensor]:
        """See `Engine.replicated_tensors`: the working weights under zero1 and zero2, nothing under zero3."""
        if self._engine.zero_optimization_stage() == 3:
            return {}
        return {name: parameter.detach() for name, parameter in self._engine.module.named_parameters()}

    def close(self) -> None:
        """Remove DeepSpeed's hooks from the model."""
        self._engine.destroy()
