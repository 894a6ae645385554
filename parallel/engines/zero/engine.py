"""DeepSpeed's ZeRO (Rajbhandari et al. 2020): data parallel, with ever more of the state cut over the ranks.

| cut over N ranks            | zero1 | zero2 | zero3 |
| --------------------------- | ----- | ----- | ----- |
| fp32 weights and moments    | yes   | yes   | yes   |
| gradients                   |       | yes   | yes   |
| working weights             |       |       | yes   |

What moves, and the memory formulas, are in docs/parallelism.md beside those of the other engines.

DeepSpeed is used for that alone. The loop owns accumulation, the learning rate, the clipping bound and checkpoints;
`zero_setup.py` is the one place where DeepSpeed's configuration is made. The inner optimizer is the one of the
other engines, so nothing is compiled at start-up.
"""

import io
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from parallel.bootstrap import Runtime
from parallel.config import ParallelConfig
from parallel.engine import CheckpointTensor, LossFn, Trainable, no_limit
from parallel.engines.blocks import apply_to_blocks
from parallel.engines.moments import zero_moments
from parallel.engines.precision import LossScaler
from parallel.engines.zero.setup import bucket_sizes, deepspeed_config, import_deepspeed
from parallel.engines.zero.state import pieces, refresh_working_weights, state_of


def build_zero(config: ParallelConfig, runtime: Runtime, trainable: Trainable) -> "ZeroEngine":
    """Collective. Raises LaunchError if DeepSpeed or the precision is not available."""
    deepspeed = import_deepspeed(config, runtime.device)
    settings = deepspeed_config(config, runtime.device)
    in_parts = deepspeed.zero.Init(config_dict_or_path=settings) if config.engine == "zero3" else nullcontext()
    with torch.device(runtime.device), in_parts:
        model = trainable.build()
    apply_to_blocks(model, config)
    settings["zero_optimization"] |= bucket_sizes(model)
    if config.engine == "zero3":  # gather a block at once, and outside of what checkpointing computes again
        deepspeed.utils.set_z3_leaf_modules(model, [type(model.get_submodule("layers.0"))])
    with redirect_stdout(io.StringIO()):  # it prints tables of its own memory
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=trainable.optimizer(model), config=settings, dist_init_required=False
        )
    return ZeroEngine(engine, model, trainable, LossScaler() if config.precision == "fp16" else None)


class ZeroEngine:
    """See `parallel.engine.Engine`."""

    def __init__(self, engine: Any, model: nn.Module, trainable: Trainable, scaler: LossScaler | None) -> None:
        """`engine` is DeepSpeed's. Collective."""
        self._engine = engine
        self._optimizer = engine.optimizer
        self._inner: torch.optim.Optimizer = engine.optimizer.optimizer
        self._scaler = scaler
        self._norm_limit = no_limit
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._pieces = list(pieces(self._optimizer, names))
        for flat in {id(piece.flat): piece.flat for piece in self._pieces}.values():
            self._inner.state[flat] = zero_moments(flat)  # before the first step, as a checkpoint needs them any time
        self._guard_inner_step()
        with torch.no_grad():
            for piece in self._pieces:  # DeepSpeed made them from rounded weights
                value = trainable.initial_value(piece.name, piece.shape).flatten()
                piece.of(piece.flat).copy_(value[piece.start : piece.start + piece.count])
        self.refresh_working_weights()

    def _guard_inner_step(self) -> None:
        """DeepSpeed's step computes the norm, then calls the inner optimizer; between the two is our place to skip."""
        move = self._inner.step

        def move_if_sound(*arguments: Any, **options: Any) -> None:
            limit = self._norm_limit()
            if self._norm() <= limit:
                move(*arguments, **options)

        self._inner.step = move_if_sound  # pyright: ignore[reportAttributeAccessIssue]

    def _norm(self) -> float:
        return math.inf if self._optimizer.overflow else float(self._optimizer._global_grad_norm)

    def forward_backward(self, micro_batches: Sequence[Any], loss_fn: LossFn, scale: float) -> Tensor:
        if self._scaler is not None:
            self._optimizer.loss_scaler.cur_scale = self._scaler.scale.item()
        losses: list[Tensor] = []
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            self._engine.set_gradient_accumulation_boundary(last)
            loss_S = loss_fn(self._engine, batch)
            self._engine.backward(loss_S.sum() * scale)
            if not last:
                self._engine.step()  # no boundary: it only counts the micro batch
            losses.append(loss_S.detach().float())
        return torch.stack(losses).sum(dim=0)

    def step(self, lr: float, max_grad_norm: float, norm_limit: Callable[[], float] = no_limit) -> float:
        for group in self._inner.param_groups:
            group["lr"] = lr
        self._optimizer.clip_grad = max_grad_norm
        self._norm_limit = norm_limit
        self._engine.step()
        norm = self._norm()
        if self._scaler is not None:
            self._scaler.update(math.isfinite(norm))
        return norm

    @torch.no_grad()
    def evaluate(self, batch: Any, loss_fn: LossFn) -> Tensor:
        self._engine.eval()
        loss_S = loss_fn(self._engine, batch).float()
        self._engine.train()
        return loss_S

    def state(self) -> dict[str, CheckpointTensor]:
        return state_of(self._pieces, self._inner) | (self._scaler.state() if self._scaler is not None else {})

    def refresh_working_weights(self) -> None:
        refresh_working_weights(self._optimizer)

    def replicated_tensors(self) -> dict[str, Tensor]:
        """Under zero1 and zero2 the working weights are whole on every rank; the rest is cut."""
        if self._engine.zero_optimization_stage() == 3:
            return {}
        return {name: parameter.detach() for name, parameter in self._engine.module.named_parameters()}

    def close(self) -> None:
        """Take DeepSpeed's hooks out of the model."""
        self._engine.destroy()
