"""Linear layers that are fast in each precision on each CPU.

A CPU without AVX-512 or AMX has no products in bf16. Torch multiplies in plain loops there, at about a ninth of the
speed of fp32 (docs/performance.md). So the factors are cast to fp32, and the result is rounded to the input's
precision. That is what products in bf16 compute as well: they add up in fp32.

Shapes: N tokens, D inputs, F outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.sharded import as_sharded


def _slow_on_this_cpu() -> frozenset[torch.dtype]:
    has = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    supported = {torch.bfloat16: has._is_mkldnn_bf16_supported(), torch.float16: has._is_mkldnn_fp16_supported()}
    return frozenset(dtype for dtype, is_supported in supported.items() if not is_supported)


SLOW = _slow_on_this_cpu()
"""The types of which this CPU has no products."""


def is_slow(x: Tensor) -> bool:
    """Whether products of this tensor are better computed in fp32."""
    return x.dtype in SLOW and x.device.type == "cpu"


class Linear(nn.Linear):
    """`nn.Linear`, in fp32 inside where the CPU has no products in the precision of the input."""

    def forward(self, input: Tensor) -> Tensor:
        """x W' + b, in the precision of the input."""
        if not is_slow(input):
            return super().forward(input)
        if torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export() or as_sharded(self.weight) is not None:
            bias = None if self.bias is None else self.bias.float()  # pyright: ignore[reportUnnecessaryComparison]
            return F.linear(input.float(), self.weight.float(), bias).to(input.dtype)
        return _WideLinear.apply(input, self.weight, self.bias)  # pyright: ignore[reportReturnType]


class _WideLinear(torch.autograd.Function):
    """It keeps the narrow input for the backward pass, where torch's own operations would keep fp32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_FD)
        ctx.has_bias = bias_F is not None
        return F.linear(x.float(), weight_FD.float(), None if bias_F is None else bias_F.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight_FD = ctx.saved_tensors
        grad_NF, x_ND = grad_outputs[0].flatten(0, -2).float(), x.flatten(0, -2).float()
        dx = (grad_NF @ weight_FD.float()).view_as(x).to(x.dtype)
        dw_FD = (grad_NF.T @ x_ND).to(weight_FD.dtype)
        return dx, dw_FD, grad_NF.sum(0).to(weight_FD.dtype) if ctx.has_bias else None
