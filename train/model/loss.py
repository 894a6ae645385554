"""Cross-entropy fused with the output projection, so that only a chunk of the logits exists at a time.

Shapes: N = B T tokens, D d_model, V vocabulary, C tokens of a chunk.

The gradient of a summed loss with respect to the logits is softmax - one_hot, which needs only the logits. So the
forward pass computes both gradients of a chunk while its logits are still in the cache, and the backward pass only
scales them. This requires an equal weight for the loss of every row, as in a sum. The backward pass checks it.

The computation of a chunk is compiled on CUDA, and elsewhere with `parallel.compile`. The host reads no result, so it
never waits for the device.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.stream.batch import IGNORE
from train.model.kernels.linear import is_slow

CHUNK_BYTES = 2**24
"""Size of the fp32 logits of a chunk: small enough for a CPU's last cache, large enough for fast products."""
CHUNK_TOKENS = 384
"""Fewest tokens of a chunk: each chunk adds to the whole gradient of the weight, which has V D elements."""
DEVICE_CHUNK_BYTES, DEVICE_CHUNK_TOKENS = 2**30, (2048, 4096)
"""The same on other devices than a CPU, with the most tokens too: enough for products at full speed."""
SCALED_ROWS = 4096
"""Rows of a gradient that the backward pass scales at a time."""

LossByRow = Callable[[Tensor, Tensor], Tensor]
"""`loss_by_row(logits_BTV, labels_BT)`: the summed loss of each sequence in nats, shape (B,), fp32."""

Gradients = tuple[Tensor, Tensor | None, Tensor | None]
"""Loss of each token (N,) in fp32, and the gradients of their sum: of the inputs (N, D) and the weight (V, D), or
None."""


def linear_cross_entropy_by_row(
    x_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, *, compiled: bool = False
) -> Tensor:
    """Summed (not mean) loss in nats of each sequence over labels that are not IGNORE. Shape (B,), fp32.

    The logits are x @ weight', of which only a chunk is stored at a time. All rows must get the same gradient.
    `compiled`: compile the computation of a chunk, which on CUDA is always done."""
    compiled = compiled or x_BTD.is_cuda
    return _FusedLoss.apply(x_BTD, weight_VD, labels_BT, compiled, torch.is_grad_enabled())  # pyright: ignore[reportReturnType]


def chunk_tokens(device_type: str, n_tokens: int, vocab_size: int) -> int:
    """Tokens of a chunk. On a device all chunks are about equal, so that they are compiled once."""
    if device_type == "cpu":
        return max(CHUNK_TOKENS, CHUNK_BYTES // (4 * vocab_size))
    fewest, most = DEVICE_CHUNK_TOKENS
    limit = min(most, max(fewest, DEVICE_CHUNK_BYTES // (4 * vocab_size)))
    return -(-n_tokens // -(-n_tokens // limit))


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, compiled: bool, with_gradients: bool
    ) -> Tensor:
        dtype = torch.float32 if is_slow(x_BTD) else x_BTD.dtype
        x_ND, labels_N = x_BTD.to(dtype).flatten(0, 1).contiguous(), labels_BT.flatten()
        with torch.autocast(x_BTD.device.type, enabled=False):
            loss_N, dx_ND, dw_VD = _chunk_by_chunk(x_ND, weight_VD.to(x_ND.dtype), labels_N, compiled, with_gradients)
        if dx_ND is not None and dw_VD is not None:
            ctx.save_for_backward(dx_ND.view_as(x_BTD).to(x_BTD.dtype), dw_VD.to(weight_VD.dtype))
        return loss_N.view_as(labels_BT).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_B,) = grad_outputs
        gradients = ctx.saved_tensors
        is_equal_B = (grad_B == grad_B[0]) | grad_B.isnan()
        torch._assert_async(is_equal_B.all(), "the fused loss needs one gradient for all rows")
        # The factor stays fp32: rounded to bf16 it would make all gradients up to 0.2 % too large or too small. Scaling
        # is in place and by rows, since the weight's gradient is as large as the embedding. Nothing else uses it.
        for gradient in gradients:
            for rows in gradient.split(SCALED_ROWS):
                rows.copy_(rows.float() * grad_B[0])
        return *gradients, None, None, None


def _chunk_by_chunk(
    x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, compiled: bool, with_gradients: bool
) -> Gradients:
    loss_N = torch.empty(len(x_ND), dtype=torch.float32, device=x_ND.device)
    dx_ND = torch.empty_like(x_ND) if with_gradients else None
    dw_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if with_gradients else None
    through_logits = _compiled() if compiled else _through_logits
    size = chunk_tokens(x_ND.device.type, len(x_ND), len(weight_VD))
    for start in range(0, len(x_ND), size):
        chunk = slice(start, start + size)
        loss_N[chunk], d_CV = through_logits(x_ND[chunk], weight_VD, labels_N[chunk, None], with_gradients)
        if dx_ND is not None and dw_VD is not None:
            torch.mm(d_CV, weight_VD, out=dx_ND[chunk])
            dw_VD += d_CV.T @ x_ND[chunk]
    return loss_N, dx_ND, dw_VD.to(weight_VD.dtype) if dw_VD is not None else None


def _through_logits(x_CD: Tensor, weight_VD: Tensor, labels_C1: Tensor, with_gradients: bool) -> tuple[Tensor, Tensor]:
    """A chunk's losses, shape (C,), and the gradient of its logits in the input's precision, empty if not wanted.

    The fp32 tensors as large as the logits are freed on return, before the products that follow."""
    counts_C1 = labels_C1 != IGNORE
    targets_C1 = labels_C1.where(counts_C1, 0)
    log_p_CV = F.log_softmax(x_CD @ weight_VD.T, dim=-1, dtype=torch.float32)
    loss_C = -(log_p_CV.gather(1, targets_C1) * counts_C1)[:, 0]
    if not with_gradients:
        return loss_C, x_CD.new_empty(0)
    if torch.compiler.is_compiling():  # without a scatter it is fused with the rest
        is_target_CV = torch.arange(len(weight_VD), device=x_CD.device) == targets_C1
        return loss_C, ((log_p_CV.exp() - is_target_CV.float()) * counts_C1).to(x_CD.dtype)
    d_CV = log_p_CV.exp_()
    d_CV.scatter_add_(1, targets_C1, torch.full_like(targets_C1, -1.0, dtype=torch.float32)).mul_(counts_C1)
    return loss_C, d_CV.to(x_CD.dtype)


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]:
    return torch.compile(_through_logits, dynamic=False)
