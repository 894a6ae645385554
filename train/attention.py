"""Causal attention within documents: the one place where its form is chosen.

| device            | form                                                       | what is not computed              |
| ----------------- | ---------------------------------------------------------- | --------------------------------- |
| cuda              | FlexAttention with a block mask, compiled                  | blocks without a visible key      |
| cpu               | `keepstep::attention`: 128 queries by the keys they reach  | keys before the chunk's documents |
| others, in export | SDPA with a dense boolean mask                             | nothing is left out               |

Shapes: B micro batch, T sequence, H query heads, K key/value heads, G = H / K, E head width, C queries of a chunk, S
keys that a chunk sees.

On CPU torch's own kernel multiplies small tiles at a quarter of the speed of large bf16 products (docs/performance.md),
so `keepstep::attention` is made of large ones. Scores and softmax are fp32, probabilities and the gradient of scores
have the input's precision; the backward pass computes the scores again, so memory is O(T). It is a custom operator so
that compiling and selective recomputation see one operation.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

CHUNK = 128
"""Queries of one product. Smaller wastes less above the diagonal; larger multiplies faster."""

Boundaries = Tensor | BlockMask
"""What layers are told of documents: the start of each token's document (cpu), a block mask (cuda), or a dense mask."""


def find_boundaries(documents_BT: Tensor) -> Boundaries:
    """Once a forward pass, for `attend` in each layer."""
    match documents_BT.device.type:
        case "cpu" if not _exporting():
            return document_starts(documents_BT)
        case "cuda" if not _exporting():
            B, T = documents_BT.shape
            return create_block_mask(visible(documents_BT), B, None, T, T, documents_BT.device, _compile=True)
        case _:
            return dense_mask(documents_BT)


def attend(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, boundaries: Boundaries) -> Tensor:
    """softmax(q k / sqrt(E)) v over the keys that each query may see. Shape (B, T, H, E)."""
    if isinstance(boundaries, Tensor) and boundaries.dtype == torch.int32:
        return _attention(q_BTHE, k_BTKE, v_BTKE, boundaries)
    q, k, v = q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    if isinstance(boundaries, BlockMask):
        flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
        return flex(q, k, v, block_mask=boundaries, enable_gqa=grouped).transpose(1, 2)
    out_BHTE = F.scaled_dot_product_attention(q, k, v, attn_mask=boundaries, enable_gqa=grouped)
    return out_BHTE.transpose(1, 2)


def document_starts(documents_BT: Tensor) -> Tensor:
    """The index in its row of the first token of each token's document. Shape (B, T), int32."""
    index_T = torch.arange(documents_BT.shape[1], dtype=torch.int32, device=documents_BT.device)
    changed = documents_BT.diff(dim=1, prepend=documents_BT[:, :1]) != 0
    return torch.where(changed, index_T, 0).cummax(dim=1).values


def dense_mask(documents_BT: Tensor) -> Tensor:
    """True where query t may see key s: s <= t and the same document. Shape (B, 1, T, T)."""
    T = documents_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=documents_BT.device).tril()
    return (causal_TT & (documents_BT[:, :, None] == documents_BT[:, None, :])).unsqueeze(1)


def visible(documents_BT: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The same rule for FlexAttention."""

    def rule(b: Tensor, _head: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s <= t) & (documents_BT[b, t] == documents_BT[b, s])

    return rule


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)  # pyright: ignore[reportReturnType]


def _exporting() -> bool:
    """A custom operator would mean nothing outside torch."""
    return torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()


@dataclass(frozen=True)
class Chunk:
    """Queries [start, end) of a row, which see keys from `first_key` on, less those `hidden` of the last: (C, them)."""

    start: int
    end: int
    first_key: int
    hidden: Tensor


def cut_row(starts_T: Tensor) -> Iterator[Chunk]:
    """The chunks of one row, each with the fewest keys that hold all it may see."""
    T = len(starts_T)
    ends = [min(start + CHUNK, T) for start in range(0, T, CHUNK)]
    firsts, lasts = starts_T[::CHUNK].tolist(), starts_T[[end - 1 for end in ends]].tolist()
    for start, end, first_key, last_start in zip(range(0, T, CHUNK), ends, firsts, lasts, strict=True):
        if first_key == last_start:  # one document: all keys before the chunk are seen
            yield Chunk(start, end, first_key, _above_diagonal(end - start))
            continue
        t_C1 = torch.arange(start, end, dtype=torch.int32)[:, None]
        s_S = torch.arange(first_key, end, dtype=torch.int32)
        yield Chunk(start, end, first_key, (s_S > t_C1) | (s_S < starts_T[start:end, None]))


@functools.cache
def _above_diagonal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)


@torch.library.custom_op("keepstep::attention", mutates_args=(), device_types="cpu")
def _attention(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts_BT: Tensor) -> Tensor:
    out_BTHE = torch.empty_like(q_BTHE, memory_format=torch.contiguous_format)
    K = k_BTKE.shape[2]
    for b, starts_T in enumerate(starts_BT):
        k_KTE, v_KTE = k_BTKE[b].transpose(0, 1), v_BTKE[b].transpose(0, 1)
        q32_TKGE, k32_KTE = _scaled(q_BTHE[b], K).float(), k_KTE.float()
        for chunk in cut_row(starts_T):
            keys = slice(chunk.first_key, chunk.end)
            p_KXS = _probabilities(q32_TKGE, k32_KTE, chunk).to(v_KTE.dtype)
            _store(out_BTHE[b], chunk, p_KXS @ v_KTE[:, keys])
    return out_BTHE


@torch.library.custom_op("keepstep::attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    grad_BTHE: Tensor, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """With P = softmax(S): dV = P' dO; dS = P * (dO V' - rowsum(P * dO V')); dQ = dS K; dK = dS' Q (Dao 2022, B.2)."""
    dq_BTHE, dk_BTKE, dv_BTKE = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BTHE, k_BTKE, v_BTKE)
    )
    K, E = k_BTKE.shape[2:]
    for b, starts_T in enumerate(starts_BT):
        k_KTE, v_KTE = k_BTKE[b].transpose(0, 1), v_BTKE[b].transpose(0, 1)
        q_TKGE, grad_TKGE = _scaled(q_BTHE[b], K), grad_BTHE[b].unflatten(1, (K, -1))
        q32_TKGE, k32_KTE = q_TKGE.float(), k_KTE.float()
        dk_KTE, dv_KTE = torch.zeros(2, K, len(starts_T), E, dtype=torch.float32)
        for chunk in cut_row(starts_T):
            keys = slice(chunk.first_key, chunk.end)
            p_KXS = _probabilities(q32_TKGE, k32_KTE, chunk).to(v_KTE.dtype)
            grad_KXE = _queries(grad_TKGE, chunk)
            dp_KXS = grad_KXE @ v_KTE[:, keys].mT
            ds_KXS = torch._softmax_backward_data(dp_KXS, p_KXS, -1, p_KXS.dtype)
            dv_KTE[:, keys] += p_KXS.mT @ grad_KXE
            dk_KTE[:, keys] += ds_KXS.mT @ _queries(q_TKGE, chunk)
            _store(dq_BTHE[b], chunk, (ds_KXS @ k_KTE[:, keys]).mul_(1 / math.sqrt(E)))
        dk_BTKE[b], dv_BTKE[b] = dk_KTE.transpose(0, 1), dv_KTE.transpose(0, 1)
    return dq_BTHE, dk_BTKE, dv_BTKE


def _scaled(q_THE: Tensor, kv_heads: int) -> Tensor:
    """Queries over sqrt(E), by the key/value head that they share. Shape (T, K, G, E)."""
    return q_THE.unflatten(1, (kv_heads, -1)) * (1 / math.sqrt(q_THE.shape[-1]))


def _queries(x_TKGE: Tensor, chunk: Chunk) -> Tensor:
    """A chunk's rows of the products, the query heads of a key/value head below each other: (K, X = G C, E)."""
    return x_TKGE[chunk.start : chunk.end].permute(1, 2, 0, 3).flatten(1, 2)


def _probabilities(q32_TKGE: Tensor, k32_KTE: Tensor, chunk: Chunk) -> Tensor:
    scores_KXS = _queries(q32_TKGE, chunk) @ k32_KTE[:, chunk.first_key : chunk.end].mT
    by_query = scores_KXS.unflatten(1, (-1, chunk.end - chunk.start))
    by_query[..., -chunk.hidden.shape[1] :].masked_fill_(chunk.hidden, -torch.inf)
    return scores_KXS.softmax(-1)


def _store(target_THE: Tensor, chunk: Chunk, x_KXE: Tensor) -> None:
    C = chunk.end - chunk.start
    target_THE[chunk.start : chunk.end] = x_KXE.unflatten(1, (-1, C)).permute(2, 0, 1, 3).flatten(1, 2)


@_attention.register_fake
def _(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts_BT: Tensor) -> Tensor:
    return torch.empty_like(q_BTHE, memory_format=torch.contiguous_format)


@_attention_backward.register_fake
def _(
    grad_BTHE: Tensor, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, starts_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BTHE, k_BTKE, v_BTKE))
    return dq, dk, dv


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad_BTHE: Tensor) -> tuple[Tensor | None, ...]:
    return *_attention_backward(grad_BTHE, *ctx.saved_tensors), None


_attention.register_autograd(_gradients, setup_context=_keep_inputs)
