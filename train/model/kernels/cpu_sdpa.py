"""Attention on CPU by torch's own kernel, one call for each run of documents: `keepstep::document_attention`.

A run is one document, or several short adjacent ones under a mask. Adjacent rows with the same boundaries share their
calls. A call computes no scores across runs, reads heads where they are, and is one parallel region. So threads rarely
wait for each other, which counts where other work runs on the same cores.

A CPU without products in the precision of the input gets fp32 copies (`linear.py`).

Shapes: B micro batch, T sequence, H query heads, K key/value heads, E head width, R rows and L tokens of a run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from train.model.kernels.linear import is_slow

SHORT = 128
"""Adjacent documents share a call until it has this many tokens."""


def sdpa_attention(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts_BT: Tensor) -> Tensor:
    """softmax(q k / sqrt(E)) v over the keys that each query may see, given `document_starts`. Shape (B, T, H, E)."""
    return _attention(q_BTHE, k_BTKE, v_BTKE, starts_BT)[0]


@dataclass(frozen=True)
class Run:
    """Tokens [start, end) of rows that have the same documents there."""

    rows: slice
    start: int
    end: int
    hiding: Tensor | None
    """Added to the scores: minus infinity where a query may not see the key. Shape (L, L), fp32. None for one document,
    whose queries see all keys up to their own."""

    def of(self, x_BTHE: Tensor) -> Tensor:
        """This run's part of a tensor, as the kernel takes it: a view of shape (R, H, L, E)."""
        return x_BTHE[self.rows, self.start : self.end].transpose(1, 2)

    def mask(self, dtype: torch.dtype) -> dict[str, Any]:
        """The kernel's arguments that say what is visible."""
        return {"is_causal": self.hiding is None, "attn_mask": None if self.hiding is None else self.hiding.to(dtype)}


def runs(starts_BT: Tensor) -> Iterator[Run]:
    """The runs of all rows. Together they cover every token once."""
    row = 0
    for starts, equal in groupby(starts_BT.tolist()):
        rows = slice(row, row + len(list(equal)))
        for start, end, is_one in spans([*dict.fromkeys(starts), len(starts)]):
            yield Run(rows, start, end, None if is_one else _hiding(starts_BT[rows.start, start:end] - start))
        row = rows.stop


def spans(bounds: list[int]) -> Iterator[tuple[int, int, bool]]:
    """(start, end, whether it is one document) of each run of a row, given where documents begin and the last ends."""
    begin, documents = 0, 0  # of the short documents that wait for others
    for start, end in pairwise(bounds):
        if documents and end - start >= SHORT:
            yield begin, start, documents == 1
            begin, documents = start, 0
        documents += 1
        if end - begin >= SHORT or end == bounds[-1]:
            yield begin, end, documents == 1
            begin, documents = end, 0


def _hiding(starts_L: Tensor) -> Tensor:
    index_L = torch.arange(len(starts_L), device=starts_L.device)
    hidden_LL = (index_L > index_L[:, None]) | (index_L < starts_L[:, None])
    return torch.zeros(hidden_LL.shape).masked_fill_(hidden_LL, -torch.inf)


# `torch.library.custom_op` is shorter, but it imports torch's compiler at the first call.
torch.library.define(
    "keepstep::document_attention", "(Tensor q, Tensor k, Tensor v, Tensor starts) -> (Tensor, Tensor)"
)
torch.library.define(
    "keepstep::document_attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor starts, Tensor out, Tensor lse) -> (Tensor, Tensor, Tensor)",
)
_attention = torch.ops.keepstep.document_attention.default
_attention_backward = torch.ops.keepstep.document_attention_backward.default
_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@torch.library.impl(_attention.name(), "cpu")
def _compute(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts_BT: Tensor) -> tuple[Tensor, Tensor]:
    out_BTHE, lse_BTH = _empty_results(q_BTHE)
    q, k, v = _as_multiplied(q_BTHE, k_BTKE, v_BTKE)
    for run in runs(starts_BT):
        out_RHLE, lse_RHL = _kernel(run.of(q), run.of(k), run.of(v), **run.mask(q.dtype))
        run.of(out_BTHE).copy_(out_RHLE)
        lse_BTH[run.rows, run.start : run.end].copy_(lse_RHL.transpose(1, 2))
    return out_BTHE, lse_BTH


@torch.library.impl(_attention_backward.name(), "cpu")
def _compute_backward(
    grad_BTHE: Tensor,
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    starts_BT: Tensor,
    out_BTHE: Tensor,
    lse_BTH: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _empty_gradients(q_BTHE, k_BTKE, v_BTKE)
    q, k, v = _as_multiplied(q_BTHE, k_BTKE, v_BTKE)
    grad, out = grad_BTHE.to(q.dtype), out_BTHE.to(q.dtype)
    for run in runs(starts_BT):
        lse_RHL = lse_BTH[run.rows, run.start : run.end].transpose(1, 2)
        inputs = (run.of(grad), run.of(q), run.of(k), run.of(v), run.of(out), lse_RHL)
        parts = _kernel_backward(*inputs, dropout_p=0.0, **run.mask(q.dtype))
        for gradient, part_RHLE in zip(gradients, parts, strict=True):
            target = run.of(gradient)
            heads = target.shape[1]
            grouped = part_RHLE if part_RHLE.shape[1] == heads else part_RHLE.unflatten(1, (heads, -1)).sum(2)
            target.copy_(grouped)
    return gradients


def _as_multiplied(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with equal numbers of heads, in a precision that this CPU multiplies well."""
    groups = q_BTHE.shape[2] // k_BTKE.shape[2]
    if is_slow(q_BTHE):
        q_BTHE, k_BTKE, v_BTKE = q_BTHE.float(), k_BTKE.float(), v_BTKE.float()
    if groups > 1:
        k_BTKE, v_BTKE = (x.repeat_interleave(groups, dim=2) for x in (k_BTKE, v_BTKE))
    return q_BTHE, k_BTKE, v_BTKE


def _empty_results(q_BTHE: Tensor) -> tuple[Tensor, Tensor]:
    out_BTHE = torch.empty_like(q_BTHE, memory_format=torch.contiguous_format)
    dtype = torch.float64 if q_BTHE.dtype == torch.float64 else torch.float32
    return out_BTHE, torch.empty(q_BTHE.shape[:3], dtype=dtype, device=q_BTHE.device)


def _empty_gradients(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BTHE, k_BTKE, v_BTKE))
    return dq, dk, dv


@torch.library.register_fake(_attention)
def _(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts_BT: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_results(q_BTHE)


@torch.library.register_fake(_attention_backward)
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(q, k, v)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_BTHE: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    return *_attention_backward(grad_BTHE, *ctx.saved_tensors), None


torch.library.register_autograd(_attention, _gradients, setup_context=_keep)


@register_flop_formula(torch.ops.keepstep.document_attention)
def _flops(q_shape: tuple[int, ...], *_shapes: Any, **_out: Any) -> int:
    """FLOP of the two products, each over half of the T x T square. A compiler weighs recomputation by it."""
    B, T, H, E = q_shape
    return 2 * B * H * T * T * E
