"""The feed-forward part of a block: the one place where it is chosen."""

from train.model.config import ModelConfig
from train.model.mlp import GELU, FeedForward, SwiGLU


def feed_forward_class(config: ModelConfig) -> type[FeedForward]:
    """The class of the feed-forward part. The one place where it is chosen."""
    match config.activation:
        case "swiglu":
            return SwiGLU
        case "gelu":
            return GELU


def build_feed_forward(config: ModelConfig) -> FeedForward:
    """The feed-forward part of a block."""
    return feed_forward_class(config)(config)
