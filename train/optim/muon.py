"""Muon for the matrices inside blocks, AdamW for the rest: one optimizer, so that engines see one.

Jordan et al. 2024 (Muon): the update is the momentum, made orthogonal by Newton-Schulz steps. Scaled by
0.2 sqrt(max(rows, columns)) it is as large as AdamW's, so both share one learning rate and one weight decay (Liu et al.
2025, "Muon is scalable for LLM training", equation 4).

Under FSDP2 and tensor parallelism a matrix is cut, but its update needs the whole. Each rank gathers the momentum of
one matrix at a time, in bf16, computes the same products and keeps its slice.
"""

import math
from typing import Any

import torch
from torch import Tensor

from parallel.sharded import local_part, part_of, whole_of
from train.optim.adamw import FusedAdamW

MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 that bring singular values near 1 fastest (Jordan et al. 2024)."""


class MuonAdamW(FusedAdamW):
    """Muon for groups with `muon` set, AdamW for the others. Under sharding `step` is collective.

    State of a matrix under Muon: `step` and `exp_avg` (the momentum), half of AdamW's."""

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """`step` and the momentum under Muon; AdamW's state otherwise."""
        if not group["muon"]:
            return super().new_state(parameter, group)
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, "exp_avg": torch.zeros_like(parameter)}

    def update_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of one group that have a gradient. Collective under sharding."""
        if not group["muon"]:
            super().update_group(group)
            return
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._update_matrix(parameter, group["lr"], group["weight_decay"])

    def _update_matrix(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[parameter]
        assert parameter.grad is not None
        state["step"] += 1
        state["exp_avg"].mul_(MOMENTUM).add_(parameter.grad)
        momentum = parameter.grad.add(state["exp_avg"], alpha=MOMENTUM).bfloat16()  # Nesterov's
        whole = whole_of(momentum)
        update = part_of(orthogonal(whole) * (0.2 * math.sqrt(max(whole.shape))), like=parameter)
        local_part(parameter).mul_(1 - lr * weight_decay).add_(update.to(parameter.dtype), alpha=-lr)


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with its singular values replaced by values near 1 (0.7 to 1.2). Same shape, bf16 products."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
