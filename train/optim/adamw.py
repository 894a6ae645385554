"""AdamW (Loshchilov and Hutter 2019) by torch's fused kernel, for plain and for sharded parameters.

It has the same bits as `torch.optim.AdamW(fused=True)`, but does not import torch's compiler, which that class imports
at its first use: half a second and hundreds of files at each start of each rank. The update is elementwise, so each
rank updates its own part, without DTensor's dispatch for every tensor.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from parallel.optimizer import EngineOptimizer
from parallel.sharded import local_part
from train.optim.average import average_of, share_of_new, steps_done, update_averages


class FusedAdamW(EngineOptimizer):
    """AdamW. State of a parameter: `step`, `exp_avg` (first moment) and `exp_avg_sq` (second moment).

    With `ema_decay`, the state has an `average` of the parameter too (`train/optim/average.py`)."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        ema_decay: float | None = None,
    ) -> None:
        """A group may have its own `weight_decay`; the default is 0."""
        self.ema_decay = ema_decay  # before groups are added
        # `fused` makes torch zero gradients in one operation.
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "fused": True})

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """`step` and two moments of zeros."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
            **average_of(parameter, self.ema_decay),
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient, then its average."""
        # Read before the update: the engine has just waited for the device, so it has nothing else to finish.
        share = None if self.ema_decay is None else share_of_new(steps_done(self) + 1, self.ema_decay)
        for group in self.param_groups:
            self.update_group(group)
        if share is not None:
            update_averages(self, share)

    def update_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of one group that have a gradient."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            [local_part(parameter) for parameter in parameters],
            [local_part(parameter.grad) for parameter in parameters],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
