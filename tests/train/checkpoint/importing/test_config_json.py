"""config.json: every field that changes the function is compared with the recipe or refused by name and value."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen3Config

from train.checkpoint.importing.architectures import ARCHITECTURES, HARMLESS, ONLY, READ_ELSEWHERE
from train.checkpoint.importing.config_json import check_stated, read_stated, stated_by
from train.errors import CheckpointError
from train.model.config import ModelConfig, MupConfig

MODEL = ModelConfig(vocab_size=64, seq_len=16, n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, d_ff=64)
QWEN3 = MODEL.model_copy(update={"qk_norm": True})
GPT2 = ModelConfig(
    vocab_size=64, seq_len=16, n_layers=2, n_heads=4, d_model=32, positions="learned", norm="layernorm",
    activation="gelu", bias=True,
)  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
BASES: dict[str, tuple[dict[str, Any], ModelConfig]] = {
    "llama": (LLAMA, MODEL),
    "mistral": (LLAMA | {"model_type": "mistral", "sliding_window": None}, MODEL),
    "qwen3": (LLAMA | {"model_type": "qwen3", "head_dim": 8}, QWEN3),
    "gpt2": (
        {"model_type": "gpt2", "vocab_size": 60, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4},
        GPT2,
    ),
}
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen3": Qwen3Config, "gpt2": GPT2Config}


def check(config: dict[str, Any], model: ModelConfig) -> None:
    check_stated(stated_by(config, "config.json"), model, "their")


def test_a_recipe_with_mup_computes_another_function() -> None:
    with pytest.raises(CheckpointError, match=r"model\.mup is {'base_width': 16} in the recipe, None in the source"):
        check(LLAMA, MODEL.model_copy(update={"mup": MupConfig(base_width=16)}))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_model_that_is_the_recipe_s_is_accepted(kind: str) -> None:
    check(*BASES[kind])


HARMLESS_CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
    ("llama", {"rope_scaling": None, "sliding_window": 16, "quantization_config": None, "what_is_this": None}),
    ("llama", {"attention_dropout": 0.1, "hidden_act": "swish", "pretraining_tp": 2, "torch_dtype": "float16"}),
    ("llama", {"head_dim": 8, "max_position_embeddings": 4096, "rope_scaling": {"type": "default"}}),
    ("mistral", {"sliding_window": 16}),
    ("qwen3", {"use_sliding_window": False, "sliding_window": 4, "layer_types": ["full_attention"] * 2}),
    ("gpt2", {"resid_pdrop": 0.3, "n_ctx": 16, "n_inner": 128, "activation_function": "gelu_pytorch_tanh"}),
]


@pytest.mark.parametrize(("kind", "change"), HARMLESS_CHANGES)
def test_a_field_that_changes_no_function_is_accepted(kind: str, change: dict[str, Any]) -> None:
    config, model = BASES[kind]
    check(config | change, model)


HARMFUL_CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"tie_word_embeddings": False}, "model.tied_embeddings is True in the recipe, False in the source"),
    ("llama", {"rope_theta": 500000.0}, r"model.rope_theta is 10000.0 in the recipe, 500000.0 in the source"),
    ("llama", {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, "model.rope_theta .* 500000.0"),
    ("llama", {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta 1000000.0 and 10000.0"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling .*llama3.*only unscaled RoPE"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling .*linear"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 1.0}}, "rope_scaling .*dynamic"),
    ("llama", {"rope_scaling": "yarn"}, "rope_scaling 'yarn'"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters .*full_attention"),
    ("llama", {"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
    ("llama", {"rms_norm_eps": 1e-6}, "model.norm_eps is 1e-05 in the recipe, 1e-06 in the source"),
    ("llama", {"sliding_window": 8}, r"longer than the source's sliding_window \(8\)"),
    ("llama", {"sliding_window": "all"}, "sliding_window 'all'"),
    ("llama", {"max_position_embeddings": ""}, "max_position_embeddings ''"),
    ("llama", {"num_attention_heads": 2}, "model.n_heads is 4 in the recipe, 2 in the source"),
    ("llama", {"num_attention_heads": 8, "head_dim": 4}, "model.n_heads is 4 in the recipe, 8 in the source"),
    ("llama", {"head_dim": 16}, "head_dim 16 .*hidden_size / num_attention_heads"),
    ("llama", {"num_key_value_heads": 4}, "model.n_kv_heads is 2 in the recipe, 4 in the source"),
    ("llama", {"num_key_value_heads": None}, "model.n_kv_heads is 2 in the recipe, 4 in the source"),
    ("llama", {"num_hidden_layers": 4}, "model.n_layers is 2 in the recipe, 4 in the source"),
    ("llama", {"num_hidden_layers": "2"}, "n_layers '2'"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("llama", {"hidden_act": "relu"}, "hidden_act 'relu'"),
    ("llama", {"attention_bias": True}, "attention_bias True with mlp_bias None"),
    ("llama", {"mlp_bias": True}, "attention_bias False with mlp_bias True"),
    ("llama", {"attention_bias": True, "mlp_bias": True}, "model.bias is False in the recipe, True in the source"),
    ("llama", {"vocab_size": 65}, "model.vocab_size is 64 in the recipe, 65 in the source"),
    ("llama", {"logit_scale": 0.5}, "logit_scale 0.5"),
    ("llama", {"logits_scaling": 8.0}, "logits_scaling 8.0"),
    ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier 12.0"),
    ("llama", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping 30.0 \(not known\)"),
    ("llama", {"no_rope_layers": [1, 0]}, r"no_rope_layers \[1, 0\] \(not known\)"),
    ("llama", {"use_post_norm": False}, r"use_post_norm False \(not known\)"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved True"),
    ("llama", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    ("llama", {"layer_types": 3}, "layer_types 3"),
    ("mistral", {"sliding_window": 4}, r"sliding_window \(4\)"),
    ("mistral", {"attention_bias": True}, "attention_bias True"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4}, r"sliding_window \(4\)"),
    ("qwen3", {"attention_bias": True}, "attention_bias True"),
    ("qwen3", {"head_dim": 128}, "head_dim 128"),
    ("gpt2", {"activation_function": "relu"}, "activation_function 'relu'"),
    ("gpt2", {"activation_function": "gelu"}, "activation_function 'gelu'"),
    ("gpt2", {"n_inner": 96}, "model.d_ff is 128 in the recipe, 96 in the source"),
    ("gpt2", {"n_positions": 32}, "model.seq_len is 16 in the recipe, 32 in the source"),
    ("gpt2", {"n_head": 2}, "model.n_heads is 4 in the recipe, 2 in the source"),
    ("gpt2", {"layer_norm_epsilon": 1e-6}, "model.norm_eps"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention True"),
    ("gpt2", {"tie_word_embeddings": False}, "model.tied_embeddings"),
    ("gemma", {}, "model_type 'gemma'"),
    ("granite", {}, "model_type 'granite'"),
    ("qwen2", {}, "model_type 'qwen2'"),
]


@pytest.mark.parametrize(("kind", "change", "message"), HARMFUL_CHANGES)
def test_a_field_that_changes_the_function_is_refused_by_name_and_value(
    kind: str, change: dict[str, Any], message: str
) -> None:
    config, model = BASES.get(kind, (LLAMA | {"model_type": kind}, MODEL))
    with pytest.raises(CheckpointError, match=message) as caught:
        check(config | change, model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_missing_fields_have_the_defaults_of_transformers(kind: str) -> None:
    config, architecture = CONFIGS[kind](), ARCHITECTURES[kind]
    for field, default in architecture.fields.values():
        theirs = getattr(config, field, default)
        if field == "num_key_value_heads" and default is None:
            default = config.num_attention_heads
        assert theirs == default, field
    for field, values in architecture.only.items():
        assert getattr(config, field, values[0]) == values[0], field
    if kind != "gpt2":
        assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert getattr(config, "use_sliding_window", architecture.uses_window) == architecture.uses_window
    if kind == "mistral":
        assert config.sliding_window == architecture.window


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_field_of_transformers_is_known(kind: str) -> None:
    architecture = ARCHITECTURES[kind]
    mapped = {field for field, _ in architecture.fields.values()}
    known = mapped | architecture.only.keys() | ONLY.keys() | HARMLESS | READ_ELSEWHERE
    assert not CONFIGS[kind]().to_diff_dict().keys() - known


def test_a_file_that_is_no_config_is_refused_or_ignored(tmp_path: Path) -> None:
    assert read_stated(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"job": 1}))
    assert read_stated(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_stated(tmp_path)
