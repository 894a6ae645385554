"""Cross-entropy fused with the output projection, so that the logits of a micro batch never exist at once.

Shapes: N = B T tokens, D d_model, V vocabulary, C tokens of a chunk.

The gradient of a summed loss by the logits is softmax - one_hot: it is known as soon as the logits are. So each chunk
goes from the products to both gradients while its logits are still in the cache, and the backward pass only scales the
result. That needs every row's loss to weigh the same, which holds for a sum over rows; it is checked.

| device | a chunk is computed by                                                                    |
| ------ | ----------------------------------------------------------------------------------------- |
| cuda   | Liger's kernel (Hsu et al. 2024), where `liger-kernel` is installed; else as on the others |
| others | `_chunk_by_chunk`                                                                          |
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.stream.batch import IGNORE

CHUNK_BYTES = 2**24
"""Of fp32 logits in a chunk: fits a CPU's last cache, and is large enough for fast products."""
CHUNK_TOKENS = 384
"""At least so many in a chunk: each adds its part to the whole gradient of the weight, which is V D numbers."""

SCALED_ROWS = 4096
"""Of a gradient, at once."""

LossByRow = Callable[[Tensor, Tensor], Tensor]
"""Of (logits_BTV, labels_BT): the summed loss of each sequence in nats, shape (B,), fp32."""

Gradients = tuple[Tensor, Tensor | None, Tensor | None]
"""Loss of each token (N,) in fp32; gradients of their sum by the inputs (N, D) and by the weight (V, D), or None."""


def cross_entropy_by_row(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Summed (not mean) loss in nats of each sequence over labels that are not IGNORE. Shape (B,), fp32."""
    loss_BT = F.cross_entropy(logits_BTV.float().mT, labels_BT, ignore_index=IGNORE, reduction="none")
    return loss_BT.sum(dim=1)


def linear_cross_entropy_by_row(x_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor) -> Tensor:
    """`cross_entropy_by_row(x @ weight', labels)` without the logits. Its gradient must be the same for all rows."""
    return _FusedLoss.apply(x_BTD, weight_VD, labels_BT, torch.is_grad_enabled())  # pyright: ignore[reportReturnType]


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, with_gradients: bool) -> Tensor:
        compute = _liger if x_BTD.is_cuda and _liger_forward() is not None else _chunk_by_chunk
        x_ND, labels_N = x_BTD.flatten(0, 1).contiguous(), labels_BT.flatten()
        with torch.autocast(x_BTD.device.type, enabled=False):
            loss_N, dx_ND, dw_VD = compute(x_ND, weight_VD.to(x_ND.dtype), labels_N, with_gradients)
        if dx_ND is not None:
            ctx.save_for_backward(dx_ND.view_as(x_BTD), dw_VD)
        return loss_N.view_as(labels_BT).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_B,) = grad_outputs
        gradients = ctx.saved_tensors
        alike_B = (grad_B == grad_B[0]) | grad_B.isnan()
        torch._assert_async(alike_B.all(), "the fused loss needs one gradient for all rows")
        # The factor stays fp32: rounded to bf16 it would make all gradients up to 0.2 % too large or too small. In
        # place and by rows, for the weight's is as large as the embedding, and nobody else has it.
        for gradient in gradients:
            for rows in gradient.split(SCALED_ROWS):
                rows.copy_(rows.float() * grad_B[0])
        return *gradients, None, None


def _chunk_by_chunk(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, with_gradients: bool) -> Gradients:
    loss_N = torch.empty(len(x_ND), dtype=torch.float32, device=x_ND.device)
    dx_ND = torch.empty_like(x_ND) if with_gradients else None
    dw_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if with_gradients else None
    size = max(CHUNK_TOKENS, CHUNK_BYTES // (4 * len(weight_VD)))
    for start in range(0, len(x_ND), size):
        chunk = slice(start, start + size)
        loss_N[chunk], d_CV = _through_logits(x_ND[chunk], weight_VD, labels_N[chunk, None], with_gradients)
        if dx_ND is not None and dw_VD is not None:
            torch.mm(d_CV, weight_VD, out=dx_ND[chunk])
            dw_VD += d_CV.T @ x_ND[chunk]
    return loss_N, dx_ND, dw_VD.to(weight_VD.dtype) if dw_VD is not None else None


def _through_logits(x_CD: Tensor, weight_VD: Tensor, labels_C1: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor]:
    """A chunk's losses, shape (C,), and the gradient by its logits in the input's precision, empty if not wanted.
    What is fp32 and as large as the logits ends here, before the products."""
    counts_C1 = labels_C1 != IGNORE
    targets_C1 = labels_C1.where(counts_C1, 0)
    log_p_CV = F.log_softmax(x_CD @ weight_VD.T, dim=-1, dtype=torch.float32)
    loss_C = -(log_p_CV.gather(1, targets_C1) * counts_C1)[:, 0]
    if not with_gradients:
        return loss_C, x_CD.new_empty(0)
    d_CV = log_p_CV.exp_()
    d_CV.scatter_add_(1, targets_C1, torch.full_like(targets_C1, -1.0, dtype=torch.float32)).mul_(counts_C1)
    return loss_C, d_CV.to(x_CD.dtype)


@functools.cache
def _liger_forward() -> Callable[..., tuple[Tensor, ...]] | None:
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    return importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy").fused_linear_cross_entropy_forward


def _liger(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, with_gradients: bool) -> Gradients:
    forward = _liger_forward()
    assert forward is not None
    loss_N, _, _, _, dx_ND, dw_VD, _ = forward(
        x_ND,
        weight_VD,
        labels_N,
        ignore_index=IGNORE,
        reduction="none",
        accum_dtype=torch.float32,
        compute_gradients=with_gradients,
        weight_requires_grad=with_gradients,
    )
    return (loss_N, dx_ND, dw_VD) if with_gradients else (loss_N, None, None)
