"""Norm and gate that keep only their inputs for the backward pass, outside of torch.compile, which does so by itself.

Made of torch's single operations, a block keeps more: on CPU `nn.RMSNorm` three fp32 copies of its input, on every
device `silu(gate) * up` the value of silu. Here they are computed again, which takes a few percent of a product.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.sharded import as_sharded


class RMSNorm(nn.RMSNorm):
    """Zhang and Sennrich 2019, equation 4, in fp32 whatever the input's precision. CUDA has a kernel that is lean."""

    def forward(self, x: Tensor) -> Tensor:
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
        """With n = x scale: dw = sum(g n); dx = scale (g w - n mean(g w n))."""
        x, weight, scale = ctx.saved_tensors
        grad, normed = grad_outputs[0].float(), x.float() * scale
        by_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        mean = (grad * normed).mean(-1, keepdim=True)
        return grad.sub_(normed.mul_(mean)).mul_(scale).to(x.dtype), by_weight, None


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    return _SiluTimes.apply(gate, up)  # pyright: ignore[reportReturnType]


class _SiluTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (grad,) = grad_outputs
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
