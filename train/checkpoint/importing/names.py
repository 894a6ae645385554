"""Translates the parameter names and layouts of other systems to this model's. Pure functions.

D d_model, E head width.

| source           | a name                             | what differs besides names                               |
| ---------------- | ---------------------------------- | -------------------------------------------------------- |
| keepstep         | `layers.0.attention.query`         |                                                          |
| torchtitan Llama | `layers.0.attention.wq`            | RoPE turns neighbours: rows of query and key reorder     |
| torchtitan Qwen3 | the same, and `attention.q_norm`   | RoPE turns halves, as here                               |
| Llama            | `model.layers.0.self_attn.q_proj`  |                                                          |
| GPT-2            | `transformer.h.0.attn.c_attn`      | query, key, value in one; matrices (inputs, outputs)     |
| nanoGPT          | the same                           | query, key, value in one                                 |

`train/model/foreign_names.py` has the names of Llama and GPT-2, for import and export.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from torch import Tensor

from train.errors import CheckpointError
from train.model.config import ModelConfig
from train.model.foreign_names import GPT2, LLAMA
from train.model.gpt import parameter_of

Rope = Literal["auto", "halves", "neighbours"]
"""Which elements of a head RoPE turns together: i and i + E/2, or 2i and 2i + 1. `auto` follows the names."""
TORCHTITAN = {
    "embed": "tok_embeddings",
    "head": "output",
    "attention.query": "attention.wq",
    "attention.key": "attention.wk",
    "attention.value": "attention.wv",
    "attention.output": "attention.wo",
    "attention.query_norm": "attention.q_norm",
    "attention.key_norm": "attention.k_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
    "mlp_norm": "ffn_norm",
}
"""torchtitan's name of each module. Names inside a block are relative to it; modules not listed have the same name."""
_ROTATED = ("attention.query", "attention.key", "attention.query_norm", "attention.key_norm")
_BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq", "freqs_cis", "rope_cache", "rope.cache")
"""Ends of the names of tensors that are no parameters: causal masks and tables of angles."""


@dataclass(frozen=True)
class Layout:
    """How a source names and stores its parameters."""

    style: Literal["keepstep", "torchtitan", "llama", "gpt2"]
    neighbours: bool
    """True if RoPE turns neighbours, so that rows of query and key must be reordered."""
    transposed: bool
    """True if the matrices of blocks are stored as (inputs, outputs), as GPT-2's are."""


def layout_of(weights: Mapping[str, Tensor], config: ModelConfig, rope: Rope = "auto") -> Layout:
    """The layout of a source by its weights. CheckpointError if RoPE's pairs are not certain."""
    names = {_without_root(name) for name in weights}
    if "tok_embeddings.weight" in names:
        return Layout("torchtitan", _turns_neighbours(names, rope), transposed=False)
    neighbours = rope == "neighbours"
    if "embed_tokens.weight" in names:
        return Layout("llama", neighbours, transposed=False)
    if "wte.weight" in names:
        as_linear = (3 * config.d_model, config.d_model)
        shapes = {tuple(tensor.shape) for name, tensor in weights.items() if name.endswith(".attn.c_attn.weight")}
        return Layout("gpt2", neighbours=False, transposed=as_linear not in shapes)
    return Layout("keepstep", neighbours, transposed=False)


def _turns_neighbours(names: set[str], rope: Rope) -> bool:
    """Whether a model with torchtitan's names turns neighbours: its Llama does, its Qwen3 does not."""
    if rope != "auto":
        return rope == "neighbours"
    has_norm = any(name.endswith(".attention.q_norm.weight") for name in names)
    if not has_norm and any(name.endswith(".attention.wq.bias") for name in names):
        raise CheckpointError(
            "the source has torchtitan's names with biases and no q_norm, so it is neither its Llama nor its Qwen3 and "
            "the pairs that RoPE turns are unknown; give --rope halves (i and i + half) or --rope "
            "neighbours (2i, 2i + 1)"
        )
    return not has_norm


def translate(tensors: Mapping[str, Tensor], layout: Layout, config: ModelConfig) -> dict[str, Tensor]:
    """Weights, or one kind of optimizer state, by this model's names. A name that is not known stays as it is.

    Flat tensors, as ZeRO-3 stores them, get their shape back before rows or columns are reordered."""
    ours: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = _without_root(name)
        if name.endswith(_BUFFERS):
            continue
        block, is_qkv, kind = name.partition(".attn.c_attn.")
        if layout.style == "gpt2" and is_qkv:
            names = [f"layers.{block.removeprefix('h.')}.attention.{part}.{kind}" for part in ("query", "key", "value")]
            shape = (3 * config.d_model, config.d_model) if kind == "weight" else (3 * config.d_model,)
            ours |= zip(names, _as_linear(tensor, shape, layout.transposed).chunk(3), strict=True)
        else:
            name = _our_name(name, layout)
            shape = _shape_of(name, config)
            transposed = layout.transposed and name.startswith("layers.") and len(shape) == 2
            tensor = _as_linear(tensor, shape, transposed)
            is_rotated = layout.neighbours and name.rpartition(".")[0].endswith(_ROTATED)
            ours[name] = _halves(tensor, config) if is_rotated else tensor
    return ours


def _without_root(name: str) -> str:
    return name.removeprefix("model.").removeprefix("transformer.")


def _our_name(name: str, layout: Layout) -> str:
    """Our name of one of their parameters, whose root is removed."""
    match layout.style:
        case "torchtitan":
            table: Mapping[str, str] = TORCHTITAN
        case "llama":
            table = LLAMA
        case "gpt2":
            table = GPT2
        case "keepstep":
            return name
    our_modules = {_without_root(their_module): module for module, their_module in table.items()}
    module, _, kind = name.rpartition(".")
    layer = ""
    if module.startswith(("layers.", "h.")) and module.count(".") >= 2:
        _, number, module = module.split(".", 2)
        layer = f"layers.{number}."
    return f"{layer}{our_modules.get(module, module)}.{kind}"


def _shape_of(name: str, config: ModelConfig) -> tuple[int, ...]:
    """The shape of one of our parameters; () for a name that is not known."""
    try:
        return parameter_of(name, config).shape
    except (KeyError, IndexError):
        return ()


def _as_linear(tensor: Tensor, shape: tuple[int, ...], transposed: bool) -> Tensor:
    """The tensor as `torch.nn.Linear` stores it. A flat tensor gets `shape`, though perhaps with other padding rows."""
    if tensor.dim() == 1 and len(shape) == 2:
        if tensor.numel() == prod(shape):
            tensor = tensor.view(shape[::-1] if transposed else shape)
        elif tensor.numel() % shape[1] == 0 and not transposed:
            tensor = tensor.view(-1, shape[1])
    return tensor.T if transposed and tensor.dim() == 2 else tensor


def _halves(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows (2i, 2i + 1) of each head become rows (i, i + E/2)."""
    if tensor.shape[0] % config.head_dim:
        return tensor  # of another model: its shape is refused later
    pairs = tensor.reshape(-1, config.head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
