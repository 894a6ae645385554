"""A Hugging Face Llama of the benchmark's size, for the two contenders that train one."""

import torch
from protocol import Spec
from transformers import LlamaConfig, LlamaForCausalLM


def build_llama(spec: Spec) -> LlamaForCausalLM:
    """The model, with random weights."""
    torch.set_num_threads(spec.threads)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.d_model,
            intermediate_size=spec.d_ff,
            num_hidden_layers=spec.n_layers,
            num_attention_heads=spec.n_heads,
            max_position_embeddings=spec.seq_len,
            tie_word_embeddings=True,
            use_cache=False,
            attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
        )
    )
