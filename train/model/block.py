"""A transformer block. Shapes: B micro batch, T sequence, D d_model."""

from typing import ClassVar

from torch import Tensor, nn

from train.model.attention import Boundaries
from train.model.attention_layer import Attention
from train.model.config import ModelConfig
from train.model.feed_forward import build_feed_forward, feed_forward_class
from train.model.mlp import Auxiliary
from train.model.norm import build_norm, declare_norm
from train.model.parameters import Parameter, under


class Block(nn.Module):
    """Pre-norm transformer block: attention, then the feed-forward part, each added to the residual stream."""

    tensor_plan: ClassVar[dict[str, str]] = {"attention_norm": "sequence", "mlp_norm": "sequence"}
    llama: ClassVar[dict[str, str]] = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    gpt2: ClassVar[dict[str, str]] = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = build_norm(config)
        self.mlp = build_feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    @staticmethod
    def declare(config: ModelConfig) -> dict[str, Parameter]:
        """The parameters, by name relative to this module."""
        return {
            **under("attention_norm", declare_norm(config)),
            **under("attention", Attention.declare(config)),
            **under("mlp_norm", declare_norm(config)),
            **under("mlp", feed_forward_class(config).declare(config)),
        }

    def forward(
        self, x_BTD: Tensor, boundaries: Boundaries, rotation: tuple[Tensor, Tensor] | None
    ) -> Tensor | tuple[Tensor, Auxiliary]:
        """The residual stream after the block, (B, T, D); with `Auxiliary` if the feed-forward part reports one."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), boundaries, rotation))
        output = self.mlp(self.mlp_norm(x_BTD))
        if isinstance(output, Tensor):
            return x_BTD + self.dropout(output)
        y_BTD, auxiliary = output
        return x_BTD + self.dropout(y_BTD), auxiliary
