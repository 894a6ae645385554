"""The GPT, in GPT-2 style or Llama style by its settings.

Shapes: B micro batch, T sequence, D d_model, H query heads, K key/value heads, E head width, F d_ff, V vocabulary.

Initial values (`initial_value`), drawn in fp32 from a generator keyed by seed and parameter name, so that they are the
same bits whatever the layout:

| parameter                            | value                                |
| ------------------------------------ | ------------------------------------ |
| embeddings, head, linear matrices    | N(0, init_std)                       |
| attention.output, mlp.down matrices  | N(0, init_std / sqrt(2 n_layers))    |
| norm gains                           | 1                                    |
| biases                               | 0                                    |

The scaling of residual outputs is GPT-2's (Radford et al. 2019, section 2.3). With logits near zero at the start, the
first loss is near ln V.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.model.attention import Boundaries, attend, find_boundaries
from train.model.config import ModelConfig
from train.model.loss import LossByRow, linear_cross_entropy_by_row
from train.model.recompute import RMSNorm, silu_times


class GPT(nn.Module):
    """Parameters by plain names: embed, positions, layers.N.{attention,mlp}..., norm, head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.seq_len, config.d_model) if config.positions == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = build_norm(config, config.d_model)
        self.head = Head(config.d_model, config.vocab_size, bias=False)
        self.loss_by_row: LossByRow | None = None  # of logits; tensor parallelism, which splits V, puts its own here
        self.tie()

    def tie(self) -> None:
        """Make the head use the embedding's matrix again, after anything that replaced parameters."""
        if self.config.tied_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor, labels_BT: Tensor | None = None
    ) -> Tensor:
        """Logits_BTV; or, given labels, the summed loss of each sequence in nats, shape (B,), fp32."""
        x_BTD = self.embed(tokens_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_BT)
        x_BTD = self.dropout(x_BTD)
        boundaries = find_boundaries(documents_BT)
        rotation = rope_rotation(positions_BT, self.config) if self.config.positions == "rope" else None
        for layer in self.layers.values():
            x_BTD = layer(x_BTD, boundaries, rotation)
        x_BTD = self.norm(x_BTD)
        if labels_BT is None:
            return self.head(x_BTD)
        if self.loss_by_row is not None:
            return self.loss_by_row(self.head(x_BTD), labels_BT)
        return self.head(x_BTD, labels_BT)


class Head(nn.Linear):
    """The output projection. The fused loss stays inside it, for engines gather weights around a module's forward."""

    def forward(self, input: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        """Logits_BTV; or, given labels, the summed loss of each sequence."""
        if labels_BT is None:
            return super().forward(input)
        return linear_cross_entropy_by_row(input, self.weight, labels_BT)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, config.d_model)
        self.attention = Attention(config)
        self.mlp_norm = build_norm(config, config.d_model)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, boundaries: Boundaries, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), boundaries, rotation))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class Attention(nn.Module):
    """Causal self-attention within documents; several query heads may share a key/value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.query = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.key = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.value = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.output = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.query_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_BTD: Tensor, boundaries: Boundaries, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        B, T, _ = x_BTD.shape
        q_BTHE = self.query(x_BTD).view(B, T, -1, self.head_dim)  # -1: fewer heads under tensor parallelism
        k_BTKE = self.key(x_BTD).view(B, T, -1, self.head_dim)
        v_BTKE = self.value(x_BTD).view(B, T, -1, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTHE, k_BTKE = self.query_norm(q_BTHE), self.key_norm(k_BTKE)
        if rotation is not None:
            q_BTHE, k_BTKE = rotate(q_BTHE, rotation), rotate(k_BTKE, rotation)
        out_BTHE = attend(q_BTHE, k_BTKE, v_BTKE, boundaries)
        return self.output(out_BTHE.reshape(B, T, -1))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020) or down(gelu(up(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        gated = config.activation == "swiglu"
        self.gate = nn.Linear(config.d_model, config.ff_width, bias=config.bias) if gated else None
        self.up = nn.Linear(config.d_model, config.ff_width, bias=config.bias)
        self.down = nn.Linear(config.ff_width, config.d_model, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        up_BTF = self.up(x_BTD)
        if self.gate is not None:
            return self.down(silu_times(self.gate(x_BTD), up_BTF))
        return self.down(F.gelu(up_BTF, approximate="tanh"))


def build_norm(config: ModelConfig, width: int) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(width, config.norm_eps)
    return nn.LayerNorm(width, config.norm_eps, bias=config.bias)


def rope_rotation(positions_BT: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each (B, T, 1, E/2), fp32 whatever the precision of the run.

    RoFormer (Su et al. 2021), equation 15; pairs are the first and second half of a head, as Llama has them."""
    with torch.autocast(positions_BT.device.type, enabled=False):
        exponent_E = torch.arange(0, config.head_dim, 2, device=positions_BT.device).float() / config.head_dim
        angle_BT1E = positions_BT.float()[..., None, None] * config.rope_base**-exponent_E
        return angle_BT1E.cos(), angle_BT1E.sin()


def rotate(x_BTHE: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair by its position's angle, in fp32, and return to the input's precision."""
    cos, sin = rotation
    first, second = x_BTHE.float().unflatten(-1, (2, -1)).unbind(-2)  # backward of `chunk` would fill and add zeros
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHE.dtype)


def initial_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """The whole fp32 initial value of a parameter, by the table above, on CPU."""
    if "norm" in name.split(".")[-2]:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    residual_output = name.endswith(("attention.output.weight", "mlp.down.weight"))
    std = config.init_std / math.sqrt(2 * config.n_layers) if residual_output else config.init_std
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big") >> 1
    return torch.empty(shape).normal_(0.0, std, generator=torch.Generator("cpu").manual_seed(key))
