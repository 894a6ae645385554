"""Causal attention within documents: the one place where its form is chosen.

| form     | device | what computes it                                  | keys that it leaves out            |
| -------- | ------ | ------------------------------------------------- | ---------------------------------- |
| flex     | cuda   | FlexAttention with a block mask, compiled         | blocks of which no query sees any  |
| flash    | cuda   | FlashAttention by document (3 where installed)    | all that no query sees             |
| cudnn    | cuda   | cuDNN with a dense mask                           | none                               |
| products | cpu    | large matrix products (`kernels/cpu_products.py`) | those before a chunk's documents   |
| sdpa     | cpu    | torch's kernel by document (`kernels/cpu_sdpa.py`) | those of other runs of documents  |
| dense    | others | SDPA with a dense mask; exporters get it too      | none                               |

`parallel.attention: auto` chooses `flex` on CUDA. On a CPU it chooses `products` if there are AVX-512 products in bf16
but no AMX, and otherwise `sdpa`. The choice depends on the kind of device alone, so the same kind computes the same
bits. `flash` waits for the device once in each micro batch, to count documents.

Shapes: B micro batch, T sequence, H query heads, K key/value heads, E head width, N documents.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from train.errors import ConfigError
from train.model.cache import LayerCache
from train.model.kernels import cuda
from train.model.kernels.cpu_products import cpu_attention, document_starts
from train.model.kernels.cpu_sdpa import sdpa_attention

Form = Literal["flex", "flash", "cudnn", "products", "sdpa", "dense"]

FORMS: dict[str, tuple[Form, ...]] = {"cuda": ("flex", "flash", "cudnn"), "cpu": ("products", "sdpa")}
"""The forms that each type of device can compute, besides `dense`."""

Boundaries = Tensor | BlockMask | LayerCache
"""The boundaries of documents, which also tell the form. Each token's document start, (B, T), is int32 for `products`
and int64 for `sdpa`. Offsets of documents, (N + 1,), are for `flash`, a block mask is for `flex`, and a dense mask of
booleans for the others. A layer's cache has the mask of the new tokens."""


@dataclass
class AttentionChoice:
    """The form of a model's attention. It is chosen once, at the start of a run, and kept when the run resumes."""

    form: Form | None = None
    """None: `auto`, by the device of the tokens."""

    def on(self, device: torch.device) -> Form:
        """The form on this device."""
        return self.form or best_form(device.type)


def best_form(device_type: str) -> Form:
    """The form that `auto` stands for on this type of device, by what the device supports."""
    match device_type:
        case "cuda":
            return "flex"
        case "cpu":
            has_products = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
            return "products" if has_products else "sdpa"
        case _:
            return "dense"


def choose_form(setting: str, device_type: str, precision: str) -> Form:
    """The form that `parallel.attention` stands for. ConfigError if the device or the precision does not support it."""
    if setting == "auto":
        return best_form(device_type)
    supported = FORMS.get(device_type, ())
    form: Form | None = next((form for form in supported if form == setting), None)
    if form is None:
        choices = ", ".join(("auto", *supported))
        raise ConfigError(
            f"parallel.attention ({setting}) is not for parallel.device {device_type}; set it to one of {choices}"
        )
    if form in ("flash", "cudnn") and precision == "fp32":
        raise ConfigError(
            f"parallel.attention ({form}) does not support parallel.precision fp32; set parallel.attention to flex, or "
            "parallel.precision to bf16"
        )
    return form


def find_boundaries(documents_BT: Tensor, choice: AttentionChoice | None = None) -> Boundaries:
    """The boundaries of documents, for `attend` in each layer. Call it once per forward pass."""
    match "dense" if _exporting() else (choice or AttentionChoice()).on(documents_BT.device):
        case "products":
            return document_starts(documents_BT)
        case "sdpa":
            return document_starts(documents_BT).long()
        case "flex":
            return cuda.block_mask(documents_BT)
        case "flash":
            return cuda.document_offsets(documents_BT)
        case _:
            return dense_mask(documents_BT)


def attend(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, boundaries: Boundaries) -> Tensor:
    """softmax(q k / sqrt(E)) v over the keys that each query may see. Shape (B, T, H, E)."""
    if isinstance(boundaries, LayerCache):
        k_BTKE, v_BTKE, boundaries = boundaries.extended(k_BTKE, v_BTKE)
    if isinstance(boundaries, BlockMask):
        return cuda.flex(q_BTHE, k_BTKE, v_BTKE, boundaries)
    if boundaries.dtype == torch.int64:
        return sdpa_attention(q_BTHE, k_BTKE, v_BTKE, boundaries)
    if boundaries.dtype == torch.int32:
        form = cuda.flash if boundaries.dim() == 1 else cpu_attention
        return form(q_BTHE, k_BTKE, v_BTKE, boundaries)
    q, k, v = q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2)
    with _cudnn_on(boundaries):
        out_BHTE = F.scaled_dot_product_attention(q, k, v, attn_mask=boundaries, enable_gqa=q.shape[1] != k.shape[1])
    return out_BHTE.transpose(1, 2)


def dense_mask(documents_BT: Tensor) -> Tensor:
    """True where query t may see key s: s <= t and the same document. Shape (B, 1, T, T)."""
    T = documents_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=documents_BT.device).tril()
    return (causal_TT & (documents_BT[:, :, None] == documents_BT[:, None, :])).unsqueeze(1)


def _cudnn_on(mask: Tensor) -> AbstractContextManager[Any]:
    """On CUDA only the form `cudnn` has a dense mask, but for exporters."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if mask.is_cuda and not _exporting() else nullcontext()


def _exporting() -> bool:
    """Whether torch exports the model: other programs do not know a custom operator."""
    return torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()
