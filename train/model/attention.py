"""Causal attention within documents: the one place where its form is chosen.

| device            | form                                               | what is not computed                 |
| ----------------- | -------------------------------------------------- | ------------------------------------ |
| cuda              | FlexAttention with a block mask, compiled          | blocks without a visible key         |
| cpu               | `keepstep::attention` (`cpu_attention.py`)         | keys before the documents of a chunk |
| others, in export | SDPA with a dense boolean mask                     | nothing is left out                  |

Shapes: B micro batch, T sequence, H query heads, K key/value heads, E head width.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from train.model.cpu_attention import cpu_attention, document_starts

Boundaries = Tensor | BlockMask
"""The boundaries of documents: each token's document start (cpu), a block mask (cuda) or a dense mask (others)."""


def find_boundaries(documents_BT: Tensor) -> Boundaries:
    """The boundaries of documents, for `attend` in each layer. Call it once per forward pass."""
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
        return cpu_attention(q_BTHE, k_BTKE, v_BTKE, boundaries)
    q, k, v = q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    if isinstance(boundaries, BlockMask):
        flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
        return flex(q, k, v, block_mask=boundaries, enable_gqa=grouped).transpose(1, 2)
    out_BHTE = F.scaled_dot_product_attention(q, k, v, attn_mask=boundaries, enable_gqa=grouped)
    return out_BHTE.transpose(1, 2)


def dense_mask(documents_BT: Tensor) -> Tensor:
    """True where query t may see key s: s <= t and the same document. Shape (B, 1, T, T)."""
    T = documents_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=documents_BT.device).tril()
    return (causal_TT & (documents_BT[:, :, None] == documents_BT[:, None, :])).unsqueeze(1)


def visible(documents_BT: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule of `dense_mask` as FlexAttention's mask function of (batch, head, query, key)."""

    def rule(b: Tensor, _head: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s <= t) & (documents_BT[b, t] == documents_BT[b, s])

    return rule


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)  # pyright: ignore[reportReturnType]


def _exporting() -> bool:
    """Whether torch exports the model: other programs do not know a custom operator."""
    return torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()
