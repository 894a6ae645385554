"""AdamW (Loshchilov and Hutter 2019) by torch's fused kernel, for plain and for sharded parameters.

The same bits as `torch.optim.AdamW(fused=True)`, without what that class imports when it is first used: torch's
compiler, half a second and hundreds of files at every start of every rank. And as the update is by element, each rank
moves the part that it holds, without DTensor's dispatch of every tensor.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from parallel.sharded import local_part


class FusedAdamW(Optimizer):
    """Engines make the moments before the first step."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """Groups may have a `weight_decay` of their own. `fused` tells torch to zero gradients in one operation."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "fused": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _undecorated(Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        _undecorated(Optimizer.zero_grad)(self, set_to_none)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            self.move(group)

    def move(self, group: dict[str, Any]) -> None:
        """Update a group's parameters that have a gradient."""
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


def _undecorated(method: Any) -> Any:
    """Without the decorator that tells torch's compiler to leave the method alone, and imports it for that."""
    return getattr(method, "__wrapped__", method)
