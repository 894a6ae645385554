"""The interface of feed-forward parts, and the dense ones: SwiGLU and GELU.

Shapes: B micro batch, T sequence, D d_model, F d_ff, M metrics.
"""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.model.config import ModelConfig
from train.model.kernels.linear import Linear
from train.model.mup import matrix_std
from train.model.parameters import Parameter, linear, residual_std, under


class Auxiliary(NamedTuple):
    """What a block reports besides its output. The model adds up the values of all blocks."""

    loss: Tensor
    """Auxiliary loss in nats, summed over the tokens of the micro batch, times its coefficient. Shape (), fp32."""
    metrics_M: Tensor
    """Sums over the tokens of the micro batch, in the order of `metric_names`. Shape (M,), fp32, detached."""


class FeedForward(nn.Module):
    """Base class of feed-forward parts. A subclass states all that other files need to know about it."""

    tensor_plan: ClassVar[dict[str, str]] = {}
    """Tensor-parallel style of each part (`parallel/engines/tensor_parallel.py`); "" is the module itself."""
    llama: ClassVar[dict[str, str]] = {}
    """Name of each child in Hugging Face's Llama, relative to the block."""
    gpt2: ClassVar[dict[str, str]] = {}
    """Name of each child in Hugging Face's GPT-2, relative to the block."""

    @staticmethod
    def declare(config: ModelConfig) -> dict[str, Parameter]:
        """The parameters, by name relative to this module."""
        raise NotImplementedError

    @staticmethod
    def metric_names(config: ModelConfig) -> tuple[str, ...]:
        """Names of the M metrics that `forward` reports; empty if it reports none."""
        return ()

    def forward(self, x_BTD: Tensor) -> Tensor | tuple[Tensor, Auxiliary]:
        """Output of shape (B, T, D); with auxiliary losses or metrics, the pair of output and `Auxiliary`."""
        raise NotImplementedError


class SwiGLU(FeedForward):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    tensor_plan: ClassVar[dict[str, str]] = {"": "gather", "gate": "column", "up": "column", "down": "row"}
    llama: ClassVar[dict[str, str]] = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.d_model, config.ff_width, bias=config.bias)
        self.up = Linear(config.d_model, config.ff_width, bias=config.bias)
        self.down = Linear(config.ff_width, config.d_model, bias=config.bias)

    @staticmethod
    def declare(config: ModelConfig) -> dict[str, Parameter]:
        """The parameters, by name relative to this module."""
        gate = linear(config.ff_width, config.d_model, std=matrix_std(config), bias=config.bias)
        return {**under("gate", gate), **GELU.declare(config)}

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Output of shape (B, T, D)."""
        up_BTF = self.up(x_BTD)
        return self.down(silu_times(self.gate(x_BTD), up_BTF))


class GELU(FeedForward):
    """down(gelu(up(x))), with the tanh approximation as in GPT-2."""

    tensor_plan: ClassVar[dict[str, str]] = {"": "gather", "up": "column", "down": "row"}
    gpt2: ClassVar[dict[str, str]] = {"up": "mlp.c_fc", "down": "mlp.c_proj"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.d_model, config.ff_width, bias=config.bias)
        self.down = Linear(config.ff_width, config.d_model, bias=config.bias)

    @staticmethod
    def declare(config: ModelConfig) -> dict[str, Parameter]:
        """The parameters, by name relative to this module."""
        up = linear(config.ff_width, config.d_model, std=matrix_std(config), bias=config.bias)
        down = linear(config.d_model, config.ff_width, std=residual_std(config), bias=config.bias)
        return {**under("up", up), **under("down", down)}

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Output of shape (B, T, D)."""
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the shape of both.

    Torch's operations keep silu(gate) for the backward pass. This keeps only its inputs and recomputes it, as
    torch.compile does by itself."""
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
