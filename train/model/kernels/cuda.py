"""The forms of attention on CUDA (`train/model/attention.py`).

Shapes: B micro batch, T sequence, H query heads, K key/value heads, E head width, N documents.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def block_mask(documents_BT: Tensor) -> BlockMask:
    """The blocks of keys that each block of queries sees, for `flex`."""
    B, T = documents_BT.shape
    return _compiled_create_block_mask()(visible(documents_BT), B, None, T, T, documents_BT.device)


def visible(documents_BT: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule of `dense_mask` as FlexAttention's mask function of (batch, head, query, key)."""

    def rule(b: Tensor, _head: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s <= t) & (documents_BT[b, t] == documents_BT[b, s])

    return rule


def flex(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: BlockMask) -> Tensor:
    """FlexAttention, compiled. Shape (B, T, H, E)."""
    q, k, v = q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2)
    form = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    return form(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)  # pyright: ignore[reportAttributeAccessIssue]


def document_offsets(documents_BT: Tensor) -> Tensor:
    """Where each document begins among the B T tokens, and where the last one ends, for `flash`. Shape (N + 1,), int32.

    N is read on the host, which waits for the device."""
    _prefer_flash_3()
    begins_BT = documents_BT.diff(dim=1, prepend=documents_BT[:, :1]) != 0
    begins_BT[:, 0] = True
    (starts_N,) = begins_BT.flatten().nonzero(as_tuple=True)
    return torch.cat((starts_N, starts_N.new_tensor([documents_BT.numel()]))).int()


def flash(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, offsets: Tensor) -> Tensor:
    """FlashAttention over documents of different lengths. Shape (B, T, H, E)."""
    from torch.nn.attention.varlen import varlen_attn

    T = q_BTHE.shape[1]
    q, k, v = q_BTHE.flatten(0, 1), k_BTKE.flatten(0, 1), v_BTKE.flatten(0, 1)
    grouped = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, offsets, offsets, T, T, window_size=(-1, 0), enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out.view_as(q_BTHE)


@functools.cache
def _prefer_flash_3() -> None:
    """Use FlashAttention 3 on Hopper where its package is installed; else torch's own version 2 runs."""
    if not torch.cuda.is_available():
        return
    if torch.cuda.get_device_capability() == (9, 0) and importlib.util.find_spec("flash_attn_interface") is not None:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    # As a wrapped region it is one operation to selective recomputation, which then keeps its result.
    options: Any = {"wrap_inductor_compiled_regions": True}
    return torch.compile(flex_attention, dynamic=False, options=options)  # pyright: ignore[reportReturnType]


@functools.cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask)
