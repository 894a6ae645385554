"""A model as a Hugging Face folder: the architecture, the weights by its names, and the configs that go with them.

| ours                                         | theirs |
| -------------------------------------------- | ------ |
| RoPE, RMSNorm, SwiGLU                        | Llama  |
| the same with QK norm                        | Qwen3  |
| learned positions, LayerNorm, GELU           | GPT-2  |

Rows of the embedding beyond the tokenizer's size (padding) are left out, so that no id can be sampled that the
tokenizer does not know.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

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

Family = Literal["llama", "qwen3", "gpt2"]


def write_model(
    weights: Mapping[str, Tensor], config: ModelConfig, vocab_size: int, end_of_document: int, folder: Path
) -> None:
    """`weights` by our plain names; `vocab_size` is the tokenizer's. ConfigError if no architecture fits."""
    model = build_model(config, vocab_size, end_of_document)
    theirs = _their_weights({name: tensor.float() for name, tensor in weights.items()}, config, vocab_size)
    model.load_state_dict(theirs, strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)


def family_of(config: ModelConfig) -> Family:
    """The architecture that computes the same function. ConfigError if there is none."""
    style = (config.positions, config.norm, config.activation)
    if style == ("rope", "rmsnorm", "swiglu") and not config.qk_norm:
        return "llama"
    if style == ("rope", "rmsnorm", "swiglu") and not config.bias:
        return "qwen3"
    if style == ("learned", "layernorm", "gelu") and not config.qk_norm and config.kv_heads == config.n_heads:
        return "gpt2"
    raise ConfigError(
        f"no Hugging Face architecture has positions={config.positions}, norm={config.norm}, "
        f"activation={config.activation}, qk_norm={config.qk_norm}, bias={config.bias}, n_kv_heads={config.kv_heads}; "
        "exported are Llama, Qwen3 and GPT-2 styles (see train/export/hugging_face.py)"
    )


def build_model(config: ModelConfig, vocab_size: int, end_of_document: int) -> PreTrainedModel:
    """Their model on the meta device, for `vocab_size` tokens."""
    ids = {"bos_token_id": end_of_document, "eos_token_id": end_of_document, "pad_token_id": None}
    common = {"vocab_size": vocab_size, "tie_word_embeddings": config.tied_embeddings, **ids}
    rope = {"rope_theta": config.rope_base, "rope_type": "default"}
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


def _their_weights(weights: dict[str, Tensor], config: ModelConfig, vocab_size: int) -> dict[str, Tensor]:
    weights = dict(weights)
    weights["embed.weight"] = weights["embed.weight"][:vocab_size].contiguous()
    head = weights.pop("head.weight", None)
    weights["head.weight"] = weights["embed.weight"] if head is None else head[:vocab_size].contiguous()
    if family_of(config) == "gpt2":
        return _gpt2_weights(weights, config)
    return {_llama_name(name): tensor for name, tensor in weights.items()}


LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def _llama_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{LLAMA_NAMES[module]}.{kind}"
    _, layer, inner = module.split(".", 2)
    return f"model.layers.{layer}.{LLAMA_NAMES[inner]}.{kind}"


def _gpt2_weights(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """GPT-2 has one matrix for query, key and value, stores matrices transposed, and always has biases."""

    def get(name: str, width: int) -> Tensor:
        return weights[name] if name in weights else torch.zeros(width)

    d, theirs = config.d_model, {}
    theirs["transformer.wte.weight"] = weights["embed.weight"]
    theirs["transformer.wpe.weight"] = weights["positions.weight"]
    theirs["lm_head.weight"] = weights["head.weight"]
    for kind in ("weight", "bias"):
        theirs[f"transformer.ln_f.{kind}"] = get(f"norm.{kind}", d)
    for i in range(config.n_layers):
        ours, block = f"layers.{i}.", f"transformer.h.{i}."
        qkv = [ours + "attention." + part for part in ("query", "key", "value")]
        theirs[block + "attn.c_attn.weight"] = torch.cat([weights[f"{name}.weight"] for name in qkv]).T.contiguous()
        theirs[block + "attn.c_attn.bias"] = torch.cat([get(f"{name}.bias", d) for name in qkv])
        for our_name, their_name, width in (
            ("attention.output", "attn.c_proj", d),
            ("mlp.up", "mlp.c_fc", config.ff_width),
            ("mlp.down", "mlp.c_proj", d),
        ):
            theirs[f"{block}{their_name}.weight"] = weights[f"{ours}{our_name}.weight"].T.contiguous()
            theirs[f"{block}{their_name}.bias"] = get(f"{ours}{our_name}.bias", width)
        for our_name, their_name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            for kind in ("weight", "bias"):
                theirs[f"{block}{their_name}.{kind}"] = get(f"{ours}{our_name}.{kind}", d)
    return theirs
