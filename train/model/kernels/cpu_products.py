"""Attention on CPU by large matrix products: the custom operator `keepstep::attention`.

Torch's own kernel for CPU multiplies small tiles at a quarter of the speed of large bf16 products
(docs/performance.md). Here 128 queries are multiplied by the keys that they reach. The products are large, and few,
because threads wait for each other after each one. Scores and softmax are fp32. Probabilities and the gradient of
scores have the input's precision. The backward pass computes the scores again, so memory is O(T). As a custom operator
it is one operation to compilers and to selective recomputation.

Shapes: B micro batch, T sequence, H query heads, K key/value heads, G = H / K, E head width, C queries of a chunk, S
keys that a chunk sees, R rows of a chunk, N = R K products of one call, X = G C rows of each.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

CHUNK = 128
"""Queries of one product. Smaller values waste less above the diagonal; larger ones multiply faster."""
SCORES = 2**20
"""Most scores of one product over several rows. More is no faster and takes memory."""


def document_starts(documents_BT: Tensor) -> Tensor:
    """The index in its row of the first token of each token's document. Shape (B, T), int32."""
    index_T = torch.arange(documents_BT.shape[1], dtype=torch.int32, device=documents_BT.device)
    changed = documents_BT.diff(dim=1, prepend=documents_BT[:, :1]) != 0
    return torch.where(changed, index_T, 0).cummax(dim=1).values


def cpu_attention(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts_BT: Tensor) -> Tensor:
    """softmax(q k / sqrt(E)) v over the keys that each query may see, given `document_starts`. Shape (B, T, H, E)."""
    return _attention(q_BTHE, k_BTKE, v_BTKE, starts_BT)


@dataclass(frozen=True)
class Chunk:
    """Queries [start, end) of rows that see the same keys, [first_key, end)."""

    rows: slice
    start: int
    end: int
    first_key: int
    hiding: Tensor
    """Added to the scores of the last keys: minus infinity where a query may not see the key. Shape (C, those keys)."""


def cut(starts_BT: Tensor, heads: int) -> Iterator[Chunk]:
    """The chunks of all rows, each with the fewest keys that its queries need. Equal ones of adjacent rows are one."""
    B, T = starts_BT.shape
    for start in range(0, T, CHUNK):
        end = min(start + CHUNK, T)
        max_rows = max(1, SCORES // (heads * (end - start) * end))
        firsts, lasts = starts_BT[:, start].tolist(), starts_BT[:, end - 1].tolist()
        row = 0
        while row < B:
            first_key, after = firsts[row], row + 1
            if first_key == lasts[row]:  # one document: all keys before the chunk are seen
                while after < min(B, row + max_rows) and firsts[after] == lasts[after] == first_key:
                    after += 1
                hiding = _above_diagonal(end - start)
            else:
                t_C1 = torch.arange(start, end, dtype=torch.int32)[:, None]
                s_S = torch.arange(first_key, end, dtype=torch.int32)
                hiding = _hiding((s_S > t_C1) | (s_S < starts_BT[row, start:end, None]))
            yield Chunk(slice(row, after), start, end, first_key, hiding)
            row = after


@functools.cache
def _above_diagonal(size: int) -> Tensor:
    return _hiding(torch.ones(size, size, dtype=torch.bool).triu(1))


def _hiding(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


# `torch.library.custom_op` is shorter, but it imports torch's compiler at the first call.
torch.library.define("keepstep::attention", "(Tensor q, Tensor k, Tensor v, Tensor starts) -> Tensor")
torch.library.define(
    "keepstep::attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor starts) -> (Tensor, Tensor, Tensor)",
)
_attention = torch.ops.keepstep.attention.default
_attention_backward = torch.ops.keepstep.attention_backward.default


@torch.library.impl(_attention.name(), "cpu")
def _compute(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts_BT: Tensor) -> Tensor:
    H, K = q_BTHE.shape[2], k_BTKE.shape[2]
    out_BTHE = torch.empty_like(q_BTHE, memory_format=torch.contiguous_format)
    q32_BKGTE, k32_BKTE = _by_head(_scaled(q_BTHE), K, torch.float32), _by_head(k_BTKE, K, torch.float32)[:, :, 0]
    v_BKTE = _by_head(v_BTKE, K)[:, :, 0]
    for chunk in cut(starts_BT, H):
        p_NXS = _probabilities(q32_BKGTE, k32_BKTE, chunk).to(v_BKTE.dtype)
        _store(out_BTHE, chunk, p_NXS @ _keys(v_BKTE, chunk))
    return out_BTHE


@torch.library.impl(_attention_backward.name(), "cpu")
def _compute_backward(
    grad_BTHE: Tensor, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, with P = softmax(S): dV = P' dO; dS = P * (dO V' - rowsum(P * dO V')); dQ = dS K; dK = dS' Q.

    FlashAttention (Dao et al. 2022), appendix B.2."""
    H, K, E = q_BTHE.shape[2], *k_BTKE.shape[2:]
    dq_BTHE, dk_BTKE, dv_BTKE = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BTHE, k_BTKE, v_BTKE)
    )
    q_BKGTE, grad_BKGTE = _by_head(_scaled(q_BTHE), K), _by_head(grad_BTHE, K)
    k_BKTE, v_BKTE = _by_head(k_BTKE, K)[:, :, 0], _by_head(v_BTKE, K)[:, :, 0]
    q32_BKGTE, k32_BKTE = q_BKGTE.float(), k_BKTE.float()
    dk_BKTE, dv_BKTE = torch.zeros(2, *k_BKTE.shape, dtype=torch.float32)
    for chunk in cut(starts_BT, H):
        p_NXS = _probabilities(q32_BKGTE, k32_BKTE, chunk).to(v_BKTE.dtype)
        grad_NXE = _queries(grad_BKGTE, chunk)
        ds_NXS = torch._softmax_backward_data(grad_NXE @ _keys(v_BKTE, chunk).mT, p_NXS, -1, p_NXS.dtype)
        _keys(dv_BKTE, chunk).add_(p_NXS.mT @ grad_NXE)
        _keys(dk_BKTE, chunk).add_(ds_NXS.mT @ _queries(q_BKGTE, chunk))
        _store(dq_BTHE, chunk, (ds_NXS @ _keys(k_BKTE, chunk)).mul_(1 / math.sqrt(E)))
    dk_BTKE.copy_(dk_BKTE.transpose(1, 2))
    dv_BTKE.copy_(dv_BKTE.transpose(1, 2))
    return dq_BTHE, dk_BTKE, dv_BTKE


def _scaled(q_BTHE: Tensor) -> Tensor:
    return q_BTHE * (1 / math.sqrt(q_BTHE.shape[-1]))


def _by_head(x_BTHE: Tensor, kv_heads: int, dtype: torch.dtype | None = None) -> Tensor:
    """The heads grouped by their key/value head, each head's tokens adjacent: (B, K, G, T, E), contiguous."""
    x_BKGTE = x_BTHE.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    return x_BKGTE.to(dtype or x_BTHE.dtype, memory_format=torch.contiguous_format).contiguous()


def _queries(x_BKGTE: Tensor, chunk: Chunk) -> Tensor:
    """A chunk's queries, those of all query heads of a key/value head stacked: (N, X = G C, E)."""
    return x_BKGTE[chunk.rows, :, :, chunk.start : chunk.end].flatten(2, 3).flatten(0, 1)


def _keys(x_BKTE: Tensor, chunk: Chunk) -> Tensor:
    """A view of the keys that a chunk sees: (N, S, E)."""
    x_RKSE = x_BKTE[chunk.rows, :, chunk.first_key : chunk.end]
    return x_RKSE.view(-1, *x_RKSE.shape[2:])


def _probabilities(q32_BKGTE: Tensor, k32_BKTE: Tensor, chunk: Chunk) -> Tensor:
    """Softmax of a chunk's scores over the keys that each query may see: (N, X, S), fp32."""
    scores_NXS = _queries(q32_BKGTE, chunk) @ _keys(k32_BKTE, chunk).mT
    by_query = scores_NXS.unflatten(1, (-1, chunk.end - chunk.start))
    by_query[..., -chunk.hiding.shape[1] :].add_(chunk.hiding)
    return scores_NXS.softmax(-1)


def _store(target_BTHE: Tensor, chunk: Chunk, x_NXE: Tensor) -> None:
    """Copy a chunk's result (N, X, E) into its rows of (B, T, H, E)."""
    target_RCHE = target_BTHE[chunk.rows, chunk.start : chunk.end]
    R, C, H, E = target_RCHE.shape
    target_RCHE.copy_(x_NXE.view(R, H, C, E).transpose(1, 2))


@torch.library.register_fake(_attention)
def _(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts_BT: Tensor) -> Tensor:
    return torch.empty_like(q_BTHE, memory_format=torch.contiguous_format)


@torch.library.register_fake(_attention_backward)
def _(
    grad_BTHE: Tensor, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BTHE, k_BTKE, v_BTKE))
    return dq, dk, dv


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad_BTHE: Tensor) -> tuple[Tensor | None, ...]:
    return *_attention_backward(grad_BTHE, *ctx.saved_tensors), None


torch.library.register_autograd(_attention, _gradients, setup_context=_keep_inputs)


@register_flop_formula(torch.ops.keepstep.attention)
def _flops(q_shape: tuple[int, ...], *_shapes: Any, **_out: Any) -> int:
    """FLOP of the two products, each over half of the T x T square. A compiler weighs recomputation by it."""
    B, T, H, E = q_shape
    return 2 * B * H * T * T * E
