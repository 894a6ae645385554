"""Activation checkpointing (recomputation) and compilation of blocks.

| `parallel.activation_checkpointing` | kept of a block                           | recomputed in the backward pass |
| ----------------------------------- | ----------------------------------------- | ------------------------------- |
| none                                | everything that the backward pass needs   | nothing                         |
| selective                           | its input, matrix products and attention  | norms, activations, additions   |
| full                                | its input                                 | the whole block                 |

Recomputation and compilation both replace `block.forward`. So parameter names and the hooks that engines put around a
block stay as they are, and FSDP2 and ZeRO-3 gather weights before they recompute a block. `compile` is outermost and
sees the recomputation, so its partitioner follows the selective choice.

With `parallel.activation_memory_budget` below 1 nothing is wrapped. The compiler's partitioner keeps that share of the
activations that it would keep. It recomputes those that cost the fewest FLOP, by the FLOP formulas of operations;
those of `train/model/kernels` bring their own.
"""

import functools
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from parallel.config import ParallelConfig

KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_scaled_mm",  # fp8
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "flex_attention",
        "inductor_compiled_code",  # FlexAttention in blocks that are not compiled (`train/model/kernels/cuda.py`)
        "torch_attn::_varlen_attn",
        "keepstep::attention",
        "keepstep::document_attention",
    }
)
"""Operations whose results `selective` keeps: expensive to compute, small to store."""


def apply_to_blocks(model: nn.Module, config: ParallelConfig) -> None:
    """Replace `forward` of the blocks in `model.layers`. Call it before an engine wraps them."""
    # Both settings apply to later compilations. The second lets the partitioner recompute the input of a product where
    # only norms and elementwise operations lead to it. That saves memory at no cost in speed (docs/performance.md).
    torch._functorch.config.activation_memory_budget = config.activation_memory_budget
    torch._functorch.config.ban_recompute_materialized_backward = False
    has_dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    for index, block in enumerate(model.get_submodule("layers").children()):
        if config.activation_checkpointing != "none" and index % config.checkpoint_every_k_blocks == 0:
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": has_dropout}
            if config.activation_checkpointing == "selective":
                options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_or_recompute)
            block.forward = functools.partial(checkpoint, block.forward, **options)
        if config.compile:
            block.forward = torch.compile(block.forward)
    setattr(model.get_submodule("head"), "compiled", config.compile)  # noqa: B010 (a module's attributes have no types)


def _keep_or_recompute(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation.name().split(".")[0] in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
