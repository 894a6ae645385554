"""The section `model` of a recipe."""

from typing import Literal

from pydantic import Field, model_validator

from train.section import Section, nearest_multiple


class ModelConfig(Section):
    """The GPT. GPT-2 style and Llama style are settings of one class."""

    vocab_size: int = Field(gt=0)
    """Rows of the embedding; at least the tokenizer's size. A multiple of 64 is fastest."""
    seq_len: int = Field(gt=0)
    """Tokens in a row; a divisor of the row length that the data were built for."""
    n_layers: int = Field(gt=0)
    """Transformer blocks."""
    n_heads: int = Field(gt=0)
    """Query heads."""
    n_kv_heads: int | None = Field(default=None, gt=0)
    """Key and value heads (grouped-query attention); null: as many as n_heads."""
    d_model: int = Field(gt=0)
    """Width of the residual stream."""
    d_ff: int | None = Field(default=None, gt=0)
    """Width of the feed-forward layer; null: 4 d_model for gelu, 8/3 d_model rounded up to 64 for swiglu."""
    positions: Literal["rope", "learned"] = "rope"
    """How a token knows its place."""
    rope_base: float = Field(default=10_000.0, gt=0)
    """Longest wavelength of RoPE, in units of 2 pi tokens."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before each sub-layer and before the head."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Of the feed-forward layer."""
    bias: bool = False
    """Biases in linear layers and LayerNorms (GPT-2 has them)."""
    tied_embeddings: bool = True
    """The head uses the embedding's matrix."""
    qk_norm: bool = False
    """RMSNorm on queries and keys, per head."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On the embedding and on each sub-layer's output."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial matrices; residual outputs get init_std / sqrt(2 n_layers)."""

    @model_validator(mode="after")
    def _shapes(self) -> "ModelConfig":
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model ({self.d_model}) must be a multiple of n_heads ({self.n_heads}); "
                f"the nearest is d_model={nearest_multiple(self.d_model, self.n_heads)}"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.kv_heads})")
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"RoPE needs an even head width, but d_model / n_heads is {self.head_dim}; change n_heads")
        return self

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def ff_width(self) -> int:
        if self.d_ff is not None:
            return self.d_ff
        return 4 * self.d_model if self.activation == "gelu" else -(-self.d_model * 8 // 3 // 64) * 64
