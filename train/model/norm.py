"""Normalization layers, chosen by `model.norm`.

Torch's `nn.RMSNorm` keeps three fp32 copies of its input for the backward pass on CPU. The one here keeps only its
inputs and recomputes the rest, at a few percent of the cost of a product. torch.compile does so by itself.
"""

from typing import Any

import torch
from torch import Tensor, nn

from parallel.sharded import as_sharded
from train.model.config import ModelConfig
from train.model.parameters import Parameter


def build_norm(config: ModelConfig) -> nn.Module:
    """RMSNorm or LayerNorm over the residual stream, (..., D)."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.bias)


def declare_norm(config: ModelConfig) -> dict[str, Parameter]:
    """The parameters of `build_norm(config)`."""
    gain = {"weight": Parameter((config.d_model,), "gain")}
    has_bias = config.norm == "layernorm" and config.bias
    return {**gain, "bias": Parameter((config.d_model,), "bias")} if has_bias else gain


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019, equation 4), computed in fp32 for every input precision.

    On CUDA torch's own kernel keeps as little, so it is used there."""

    def forward(self, x: Tensor) -> Tensor:
        """The normalized input, in its shape and precision."""
        if x.device.type != "cpu" or torch.compiler.is_compiling() or as_sharded(x) is not None:
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)  # pyright: ignore[reportReturnType]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients, with n = x scale: dw = sum(g n); dx = scale (g w - n mean(g w n))."""
        x, weight, scale = ctx.saved_tensors
        grad, normed = grad_outputs[0].float(), x.float() * scale
        by_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        mean = (grad * normed).mean(-1, keepdim=True)
        return grad.sub_(normed.mul_(mean)).mul_(scale).to(x.dtype), by_weight, None
