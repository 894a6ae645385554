"""Mixed precision: working copies of the fp32 master weights, and the loss scale for fp16.

Parameters, gradients, their reduction and the optimizer state are fp32 under every engine: a bf16 weight near 1 cannot
change by less than 0.004, so most updates would be lost. Only the working copies, which the forward and backward passes
use, are narrower. FSDP2 and DeepSpeed make these copies themselves; single and DDP use `working_weights`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Type of the working copies by `parallel.precision`. fp8 is bf16 except in the products inside blocks (`fp8.py`)."""


Home = tuple[nn.Module, str, nn.Parameter]
"""A module, the name of one of its own parameters, and the parameter."""


@contextmanager
def working_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A context in which modules read `dtype` copies of their parameters; gradients flow to the fp32 parameters.

    The values are cast once, to one flat buffer. The context must include the backward passes, because recomputed
    blocks read their weights again."""
    if dtype == torch.float32:
        yield
        return
    homes = [(module, dict(module._parameters)) for module in model.modules() if module._parameters]
    hooks = _cast_where_used(model, dtype)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, parameters in homes:
            module._parameters.update(parameters)


def _cast_where_used(model: nn.Module, dtype: torch.dtype) -> list[RemovableHandle]:
    """Hooks that give each unit its copies at the start of its forward: each block, and each module outside of blocks.

    Autograd runs the newest nodes first. A cast recorded at the start of a unit's forward runs directly after the
    backward of that unit. So the unit's gradients are ready before the backward of the unit before it begins, and DDP
    exchanges them meanwhile. Casts that were all recorded before the forward pass would all run at its end."""
    narrow = _narrow_copies(list(model.parameters()), dtype)
    blocks = list(model.get_submodule("layers").children()) if hasattr(model, "layers") else []
    inside = {module for block in blocks for module in block.modules()}
    units = [list(block.modules()) for block in blocks] + [[other] for other in model.modules() if other not in inside]
    cast: dict[nn.Parameter, Tensor] = {}  # of this micro batch: a tied parameter is cast once, where it is first used

    def cast_unit(homes: list[Home], *_: Any) -> None:
        new = list(dict.fromkeys(parameter for *_, parameter in homes if parameter not in cast))
        cast.update(zip(new, _Cast.apply([narrow[parameter] for parameter in new], *new), strict=True))  # pyright: ignore[reportArgumentType]
        for module, name, parameter in homes:
            module._parameters[name] = cast[parameter]  # pyright: ignore[reportArgumentType]

    hooks = [model.register_forward_pre_hook(lambda *_: cast.clear())]
    for modules in units:
        homes = [(module, name, p) for module in modules for name, p in module._parameters.items() if p is not None]
        if homes:
            hooks.append(modules[0].register_forward_pre_hook(partial(cast_unit, homes)))
    return hooks


def _narrow_copies(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """The `dtype` values of the parameters, as parts of one buffer that begin at multiples of 64 elements."""
    sizes = [-(-parameter.numel() // 64) * 64 for parameter in parameters]
    flat = torch.empty(sum(sizes), dtype=dtype, device=parameters[0].device)
    parts = flat.split(sizes)
    copies = [part[: p.numel()].view(p.shape) for part, p in zip(parts, parameters, strict=True)]
    torch._foreach_copy_(copies, [parameter.detach() for parameter in parameters])
    return dict(zip(parameters, copies, strict=True))


class _Cast(torch.autograd.Function):
    """The given copies of fp32 parameters. The gradients of the copies become fp32 gradients of the parameters."""

    @staticmethod
    def forward(ctx: Any, copies: list[Tensor], *_parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(copy.view_as(copy) for copy in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(None if gradient is None else gradient.float() for gradient in gradients)


class LossScaler:
    """Dynamic loss scale against underflow of fp16 gradients (Micikevicius et al. 2018, section 3.2).

    Losses are multiplied by `scale` and gradients divided by it. It halves after a step with a non-finite gradient,
    which is skipped, and doubles after `GROWTH_STEPS` finite ones in a row. Both numbers are tensors, so checkpoints
    include them."""

    GROWTH_STEPS = 2000

    def __init__(self) -> None:
        self.scale = torch.tensor(2.0**16)
        self.good_steps = torch.tensor(0.0)

    def update(self, finite: bool) -> None:
        """Adjust the scale after a step. `finite` must be the same on all ranks."""
        if not finite:
            self.scale.div_(2.0)
            self.good_steps.zero_()
            return
        self.good_steps.add_(1.0)
        if self.good_steps.item() == self.GROWTH_STEPS:
            self.scale.mul_(2.0)
            self.good_steps.zero_()

    def state(self) -> dict[str, Tensor]:
        """The tensors that checkpoints save and fill, by name."""
        return {"scaler.scale": self.scale, "scaler.good_steps": self.good_steps}
