"""The attention part of a block.

Shapes: B micro batch, T sequence, D d_model, H query heads, K key/value heads, E head width.
"""

from typing import ClassVar

from torch import Tensor, nn

from train.model.attention import Boundaries, attend
from train.model.config import ModelConfig
from train.model.kernels.linear import Linear
from train.model.mup import matrix_std, query_multiplier
from train.model.norm import RMSNorm
from train.model.parameters import Parameter, linear, residual_std, under
from train.model.rope import rotate


class Attention(nn.Module):
    """Causal self-attention within documents. Several query heads may share a key/value head."""

    tensor_plan: ClassVar[dict[str, str]] = {
        "": "gather",
        "query": "column",
        "key": "column",
        "value": "column",
        "query_norm": "heads",
        "key_norm": "heads",
        "output": "row",
    }
    llama: ClassVar[dict[str, str]] = {
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "output": "self_attn.o_proj",
        "query_norm": "self_attn.q_norm",
        "key_norm": "self_attn.k_norm",
    }
    gpt2: ClassVar[dict[str, str]] = {"output": "attn.c_proj"}
    """GPT-2 stores query, key and value as one matrix, `attn.c_attn`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query_multiplier = query_multiplier(config)
        kv_width = config.kv_heads * config.head_dim
        self.query = Linear(config.d_model, config.d_model, bias=config.bias)
        self.key = Linear(config.d_model, kv_width, bias=config.bias)
        self.value = Linear(config.d_model, kv_width, bias=config.bias)
        self.output = Linear(config.d_model, config.d_model, bias=config.bias)
        self.query_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    @staticmethod
    def declare(config: ModelConfig) -> dict[str, Parameter]:
        """The parameters, by name relative to this module."""
        d, kv_width, std = config.d_model, config.kv_heads * config.head_dim, matrix_std(config)
        gain = {"weight": Parameter((config.head_dim,), "gain")}
        return {
            **under("query", linear(d, d, std=std, bias=config.bias)),
            **under("key", linear(kv_width, d, std=std, bias=config.bias)),
            **under("value", linear(kv_width, d, std=std, bias=config.bias)),
            **under("output", linear(d, d, std=residual_std(config), bias=config.bias)),
            **(under("query_norm", gain) | under("key_norm", gain) if config.qk_norm else {}),
        }

    @staticmethod
    def flops_per_token(config: ModelConfig) -> int:
        """FLOP of scores and weighted values for one token, forward and backward: 6 H E T.

        PaLM (appendix B) counts 12 H E T, all T keys. A causal query sees half of them on average."""
        return 6 * config.n_heads * config.head_dim * config.seq_len

    def forward(self, x_BTD: Tensor, boundaries: Boundaries, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Shape (B, T, D). `rotation` is that of RoPE; None with learned positions."""
        B, T, _ = x_BTD.shape
        q_BTHE = self.query(x_BTD).view(B, T, -1, self.head_dim)  # -1: fewer heads under tensor parallelism
        k_BTKE = self.key(x_BTD).view(B, T, -1, self.head_dim)
        v_BTKE = self.value(x_BTD).view(B, T, -1, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTHE, k_BTKE = self.query_norm(q_BTHE), self.key_norm(k_BTKE)
        if rotation is not None:
            q_BTHE, k_BTKE = rotate(q_BTHE, rotation), rotate(k_BTKE, rotation)
        if self.query_multiplier != 1.0:
            q_BTHE = q_BTHE * self.query_multiplier
        out_BTHE = attend(q_BTHE, k_BTKE, v_BTKE, boundaries)
        return self.output(out_BTHE.reshape(B, T, -1))
