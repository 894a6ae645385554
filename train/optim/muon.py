"""Muon for the matrices inside blocks, AdamW for the rest: one optimizer, so that engines see one.

Jordan et al. 2024 (Muon): the update is the momentum, made orthogonal by Newton-Schulz steps. Scaled by
0.2 sqrt(max(rows, columns)) it is as large as AdamW's, so both share one learning rate and one weight decay (Liu et al.
2025, "Muon is scalable for LLM training", equation 4).

The update of a matrix needs the whole of it. The ranks that hold a matrix, in parts or as copies, deal such work out
among themselves (`train/optim/dealt.py`): one of them makes the matrix orthogonal, and the others get their parts of
the update. Momenta and updates move in bf16.
"""

import math
from typing import Any

import torch
from torch import Tensor

from parallel.sharded import local_part
from train.optim.adamw import FusedAdamW
from train.optim.average import average_of
from train.optim.dealt import deal, holders_of, rounds

MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 that bring singular values near 1 fastest (Jordan et al. 2024)."""


class MuonAdamW(FusedAdamW):
    """Muon for groups with `muon` set, AdamW for the others. On several ranks `step` is collective.

    State of a matrix under Muon: `step` and `exp_avg` (the momentum), half of AdamW's."""

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """`step` and the momentum under Muon; AdamW's state otherwise."""
        if not group["muon"]:
            return super().new_state(parameter, group)
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, "exp_avg": torch.zeros_like(parameter), **average_of(parameter, self.ema_decay)}

    def create_state(self) -> None:
        """See `EngineOptimizer.create_state`; and find the ranks over which each matrix is dealt. Collective."""
        super().create_state()
        matrices = [matrix for group in self.param_groups if group["muon"] for matrix in group["params"]]
        self._holders = {matrix: holders_of(matrix.detach()) for matrix in matrices}

    def update_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of one group that have a gradient. Collective on several ranks."""
        if not group["muon"]:
            super().update_group(group)
            return
        by_ranks: dict[Any, list[Tensor]] = {}
        for matrix in group["params"]:
            if matrix.grad is not None:
                by_ranks.setdefault(self._holders[matrix].group, []).append(matrix)
        for matrices in by_ranks.values():
            for dealt in rounds(matrices, self._holders[matrices[0]].size):
                self._update_round(dealt, group["lr"], group["weight_decay"])

    def _update_round(self, matrices: list[Tensor], lr: float, weight_decay: float) -> None:
        """Update matrices, of which each rank of their group makes at most one orthogonal. Collective."""
        momenta = [self._momentum(matrix) for matrix in matrices]
        updates = deal(
            momenta, [matrix.shape for matrix in matrices], [self._holders[one] for one in matrices], update_of
        )
        for matrix, update in zip(matrices, updates, strict=True):
            part = local_part(matrix)
            part.mul_(1 - lr * weight_decay).add_(update.to(part.dtype), alpha=-lr)

    def _momentum(self, matrix: Tensor) -> Tensor:
        """Advance this rank's part of the momentum by a step; returns Nesterov's, in bf16."""
        assert matrix.grad is not None
        state, gradient = self.state[matrix], local_part(matrix.grad)
        state["step"] += 1
        momentum = local_part(state["exp_avg"]).mul_(MOMENTUM).add_(gradient)
        return gradient.add(momentum, alpha=MOMENTUM).bfloat16()


def update_of(momentum: Tensor) -> Tensor:
    """The update of a whole matrix at learning rate 1: orthogonal, and as large as AdamW's."""
    return orthogonal(momentum) * (0.2 * math.sqrt(max(momentum.shape)))


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
