"""What a Hugging Face config.json may say: for each `model_type` that is imported, the meaning of its fields.

Each known field is in one of three tables: it maps to a setting of the recipe, or it must have a value that switches it
off, or it does not change the function. Any other field is refused (`config_json.py`).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers that computes what our model computes with some settings."""

    style: dict[str, Any]
    """Settings of the section `model` that the type implies."""
    fields: dict[str, tuple[str, Any]]
    """Their field and the default of transformers, by our setting."""
    only: dict[str, tuple[Any, ...]]
    """The values that a field may have. The first is the default of transformers."""
    window: int | None = None
    """Default of `sliding_window`."""
    uses_window: bool = True
    """Default of `use_sliding_window`."""
    head_dim: int | None = None
    """Default of `head_dim`; None is hidden_size / num_attention_heads."""


_LLAMA_STYLE = {"positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "qk_norm": False}
_LLAMA_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 32000),
    "d_model": ("hidden_size", 4096),
    "d_ff": ("intermediate_size", 11008),
    "n_layers": ("num_hidden_layers", 32),
    "n_heads": ("num_attention_heads", 32),
    "n_kv_heads": ("num_key_value_heads", None),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tied_embeddings": ("tie_word_embeddings", False),
}
_LLAMA_ONLY: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}
_NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False, None), "mlp_bias": (False, None)}
_GPT2_FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 50257),
    "seq_len": ("n_positions", 1024),
    "d_model": ("n_embd", 768),
    "d_ff": ("n_inner", None),
    "n_layers": ("n_layer", 12),
    "n_heads": ("n_head", 12),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "tied_embeddings": ("tie_word_embeddings", True),
}
_GPT2_ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),  # all are the tanh approximation
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}

ARCHITECTURES = {
    "llama": Architecture(_LLAMA_STYLE, _LLAMA_FIELDS | {"bias": ("attention_bias", False)}, _LLAMA_ONLY),
    "mistral": Architecture(
        _LLAMA_STYLE | {"bias": False},
        _LLAMA_FIELDS | {"d_ff": ("intermediate_size", 14336), "n_kv_heads": ("num_key_value_heads", 8)},
        _LLAMA_ONLY | _NO_BIAS,
        window=4096,
    ),
    "qwen3": Architecture(
        _LLAMA_STYLE | {"bias": False, "qk_norm": True},
        _LLAMA_FIELDS
        | {
            "vocab_size": ("vocab_size", 151936),
            "d_ff": ("intermediate_size", 22016),
            "n_kv_heads": ("num_key_value_heads", 32),
        },
        _LLAMA_ONLY | _NO_BIAS,
        window=4096,
        uses_window=False,
        head_dim=128,
    ),
    "gpt2": Architecture(
        {"positions": "learned", "norm": "layernorm", "activation": "gelu", "qk_norm": False, "bias": True},
        _GPT2_FIELDS,
        _GPT2_ONLY,
    ),
}
"""The types that are imported, by `model_type`."""

ONLY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "auto_map": (None,),
    "embedding_multiplier": (None, 1),
    "is_encoder_decoder": (False, None),
    "attention_multiplier": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "partial_rotary_factor": (None, 1),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (None, False),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
    "use_qk_norm": (None, False),
}
"""Fields that change the function of any type, or could: the values that switch them off. The first is the default."""

_HARMLESS = """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout attn_pdrop
    bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cls_token_id
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label initializer_range is_decoder is_llama_config
    keys_to_ignore_at_inference label2id length_penalty mask_token_id max_length max_window_layers min_length
    model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type remove_invalid_values
    reorder_and_upcast_attn repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_last_hidden_states tokenizer_class top_k
    top_p torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed
    unsloth_version use_bfloat16 use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Fields that change neither the logits nor what is trained. Dropout is a setting of the recipe. `pretraining_tp` only
divides products into slices."""

READ_ELSEWHERE = frozenset(
    {
        "head_dim",
        "layer_types",
        "max_position_embeddings",
        "mlp_bias",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "use_sliding_window",
    }
)
"""Fields with a rule of their own in `config_json.py`."""
