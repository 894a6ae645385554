"""Writes a model as a Hugging Face folder: the weights by the names of an architecture, and its configs.

| ours                                         | theirs |
| -------------------------------------------- | ------ |
| RoPE, RMSNorm, SwiGLU                        | Llama  |
| the same with QK norm                        | Qwen3  |
| learned positions, LayerNorm, GELU           | GPT-2  |

Embedding rows beyond the tokenizer's size are padding and are left out. So the exported model cannot sample an id that
the tokenizer does not know.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from train.errors import ConfigError
from train.model.config import ModelConfig
from train.model.feed_forward import feed_forward_class
from train.model.foreign_names import GPT2, LLAMA
from train.model.mup import folded

Family = Literal["llama", "qwen3", "gpt2"]
"""A Hugging Face architecture."""


def write_model(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    vocab_size: int,
    end_of_document: int,
    folder: Path,
    beginning_of_document: int | None = None,
) -> None:
    """Write weights and configs to `folder`. ConfigError if no architecture fits.

    `weights` are by our plain names; `vocab_size` is the tokenizer's. A document begins after `end_of_document` if no
    other token begins it."""
    begin = end_of_document if beginning_of_document is None else beginning_of_document
    model = build_model(config, vocab_size, begin, end_of_document)
    ours = folded({name: tensor.float() for name, tensor in weights.items()}, config)  # they have no muP
    theirs = _their_weights(ours, config, vocab_size, model)
    model.load_state_dict(theirs, strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    _write_rope_theta_for_version_4(folder / "config.json")


def _write_rope_theta_for_version_4(file: Path) -> None:
    """Add `rope_theta` at the place where transformers 4 and most other readers look; version 5 has moved it."""
    config: dict[str, Any] = json.loads(file.read_text())
    if "rope_parameters" in config:
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]
        file.write_text(json.dumps(config, indent=2) + "\n")


def family_of(config: ModelConfig) -> Family:
    """The architecture that computes the same function as the model. ConfigError if there is none."""
    style, feed_forward = (config.positions, config.norm), feed_forward_class(config)
    if style == ("rope", "rmsnorm") and feed_forward.llama:
        if not config.qk_norm:
            return "llama"
        if not config.bias:
            return "qwen3"
    is_gpt2 = style == ("learned", "layernorm") and feed_forward.gpt2
    if is_gpt2 and not config.qk_norm and config.kv_heads == config.n_heads:
        return "gpt2"
    raise ConfigError(
        f"no Hugging Face architecture has positions={config.positions}, norm={config.norm}, "
        f"activation={config.activation}, qk_norm={config.qk_norm}, bias={config.bias}, n_kv_heads={config.kv_heads}; "
        "only models in the style of Llama, Qwen3 or GPT-2 can be exported (see train/export/hugging_face.py)"
    )


def build_model(config: ModelConfig, vocab_size: int, begin: int, end: int) -> PreTrainedModel:
    """Their model on the meta device, with `vocab_size` rows of embeddings; `begin` and `end` a document."""
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": None}
    common = {"vocab_size": vocab_size, "tie_word_embeddings": config.tied_embeddings, **ids}
    rope = {"rope_theta": config.rope_theta, "rope_type": "default"}
    sizes = {
        "hidden_size": config.d_model,
        "intermediate_size": config.ff_width,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
    }
    with torch.device("meta"):
        match family_of(config):
            case "llama":
                biases = {"attention_bias": config.bias, "mlp_bias": config.bias}
                model = LlamaForCausalLM(LlamaConfig(**sizes, **biases, **common))
            case "qwen3":
                model = Qwen3ForCausalLM(Qwen3Config(**sizes, **common))
            case "gpt2":
                model = GPT2LMHeadModel(_gpt2_config(config, common))
    model.generation_config = GenerationConfig(**ids, do_sample=True)
    return model


def _gpt2_config(config: ModelConfig, common: dict[str, object]) -> GPT2Config:
    return GPT2Config(
        n_embd=config.d_model,
        n_inner=config.ff_width,
        n_layer=config.n_layers,
        n_head=config.n_heads,
        n_positions=config.seq_len,
        layer_norm_epsilon=config.norm_eps,
        activation_function="gelu_new",
        attn_pdrop=0.0,
        embd_pdrop=config.dropout,
        resid_pdrop=config.dropout,
        **common,  # pyright: ignore[reportArgumentType]
    )


def _their_weights(
    weights: Mapping[str, Tensor], config: ModelConfig, vocab_size: int, model: PreTrainedModel
) -> dict[str, Tensor]:
    """The weights of their `model`, from ours."""
    weights = dict(weights)
    weights["embed.weight"] = weights["embed.weight"][:vocab_size].contiguous()
    head = weights.pop("head.weight", None)
    weights["head.weight"] = weights["embed.weight"] if head is None else head[:vocab_size].contiguous()
    if family_of(config) == "gpt2":
        return _gpt2_weights(weights, config, model)
    return {_their_name(name, LLAMA, "model.layers"): tensor for name, tensor in weights.items()}


def _their_name(name: str, table: Mapping[str, str], blocks: str) -> str:
    """Their name of one of our parameters, given a table of `foreign_names` and their name of the list of blocks."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{table[module]}.{kind}"
    _, layer, inner = module.split(".", 2)
    return f"{blocks}.{layer}.{table[inner]}.{kind}"


def _gpt2_weights(weights: dict[str, Tensor], config: ModelConfig, model: PreTrainedModel) -> dict[str, Tensor]:
    """GPT-2 has one matrix for query, key and value, stores the matrices of blocks transposed, and has all biases."""
    theirs: dict[str, Tensor] = {}
    for layer in range(config.n_layers):
        for kind in ("weight", "bias"):
            qkv = [weights.pop(f"layers.{layer}.attention.{part}.{kind}", None) for part in ("query", "key", "value")]
            if parts := [tensor for tensor in qkv if tensor is not None]:
                theirs[f"transformer.h.{layer}.attn.c_attn.{kind}"] = _transposed(torch.cat(parts))
    for name, tensor in weights.items():
        in_block = name.startswith("layers.")
        theirs[_their_name(name, GPT2, "transformer.h")] = _transposed(tensor) if in_block else tensor
    biases = {name: bias for name, bias in model.named_parameters() if name.endswith(".bias")}
    return {name: torch.zeros(bias.shape) for name, bias in biases.items()} | theirs


def _transposed(tensor: Tensor) -> Tensor:
    """The transpose of a matrix; a vector as it is."""
    return tensor.T.contiguous() if tensor.dim() == 2 else tensor
