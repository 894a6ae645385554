"""The section `model` of a recipe."""

from typing import Literal

from pydantic import Field, model_validator

from train.section import Section, nearest_multiple


class MupConfig(Section):
    """Maximal update parametrization (muP): settings found at a small width also suit a large one."""

    base_width: int = Field(gt=0, le=1 << 20)
    """Width at which `optim.lr`, `optim.weight_decay`, `optim.eps` and `model.init_std` were found. They are scaled
    from it to `model.d_model` (`train/model/mup.py`)."""


class ModelConfig(Section):
    """The GPT model. GPT-2 style and Llama style are settings of the same model."""

    vocab_size: int = Field(gt=0, le=1 << 27)
    """Number of rows of the embedding, at least the tokenizer's size. A multiple of 64 is fastest."""
    seq_len: int = Field(gt=0, le=1 << 27)
    """Tokens per sequence. Must divide the row length of the data set."""
    n_layers: int = Field(gt=0, le=10_000)
    """Number of transformer blocks."""
    n_heads: int = Field(gt=0, le=1 << 20)
    """Number of query heads."""
    n_kv_heads: int | None = Field(default=None, gt=0)
    """Number of key and value heads (grouped-query attention); null means n_heads."""
    d_model: int = Field(gt=0, le=1 << 20)
    """Width of the residual stream."""
    d_ff: int | None = Field(default=None, gt=0, le=1 << 22)
    """Width of the feed-forward layer; null means 4 d_model with gelu, and 8/3 d_model with swiglu, rounded up to
    a multiple of 64."""
    positions: Literal["rope", "learned"] = "rope"
    """Position encoding: rotary (RoPE), or a learned embedding."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the RoPE frequencies: the longest wavelength is nearly 2 pi rope_theta tokens."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalization before each sub-layer and before the head."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Constant that the normalization adds to the variance."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Activation function of the feed-forward layer."""
    bias: bool = False
    """Whether linear layers and LayerNorms have biases, as in GPT-2."""
    tied_embeddings: bool = True
    """Whether the output head shares the embedding's matrix."""
    qk_norm: bool = False
    """Whether RMSNorm is applied to the queries and keys of each head."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the embedding and on each sub-layer's output."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial matrices. Matrices that write to the residual stream get
    init_std / sqrt(2 n_layers)."""
    mup: MupConfig | None = None
    """Maximal update parametrization; null means the standard one."""

    @model_validator(mode="after")
    def _shapes(self) -> "ModelConfig":
        """`d_model` must be a multiple of `n_heads`. `n_heads` must be a multiple of `n_kv_heads`. With `rope`,
        `d_model` / `n_heads` must be even."""
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model ({self.d_model}) must be a multiple of n_heads ({self.n_heads}); "
                f"the nearest is d_model={self._nearest_width()}"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.kv_heads}); set n_kv_heads to "
                f"{max(n for n in range(1, min(self.kv_heads, self.n_heads) + 1) if self.n_heads % n == 0)}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                f"RoPE needs an even head width, but d_model ({self.d_model}) / n_heads ({self.n_heads}) is "
                f"{self.head_dim}; the nearest is d_model={self._nearest_width()}"
            )
        return self

    def _nearest_width(self) -> int:
        """The nearest d_model that the heads divide, into even parts if RoPE needs them."""
        return nearest_multiple(self.d_model, self.n_heads * (2 if self.positions == "rope" else 1))

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, with the default resolved."""
        return self.n_kv_heads or self.n_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads

    @property
    def ff_width(self) -> int:
        """Width of the feed-forward layer, with the default resolved."""
        if self.d_ff is not None:
            return self.d_ff
        return 4 * self.d_model if self.activation == "gelu" else -(-self.d_model * 8 // 3 // 64) * 64
