"""Recompute blocks in the backward pass instead of keeping their activations; and compile blocks.

| `parallel.activation_checkpointing` | kept of a block                                  | computed again             |
| ----------------------------------- | ------------------------------------------------ | -------------------------- |
| none                                | everything the backward pass needs               | nothing                    |
| selective                           | its input, and matrix products and attention     | norms, activations, adds   |
| full                                | its input                                        | the whole block            |

Both replace `block.forward`, so that names of parameters, and the hooks that engines put around a block, stay as they
are: FSDP2 and ZeRO-3 gather the weights before the block is computed again. `compile` comes outermost and sees the
recomputation; that lets its partitioner honour the selective choice.

With `parallel.activation_memory_budget` below 1 nothing is wrapped: the compiler's partitioner keeps that share of what
it would keep, and computes again what costs the fewest operations (of those that have a formula; attention brings one).
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
        "keepstep::attention",
    }
)
"""What `selective` keeps: dear to compute, small to store."""


def apply_to_blocks(model: nn.Module, config: ParallelConfig) -> None:
    """Rewrite the forward of `model.layers`; to be called before an engine wraps them."""
    # For what is compiled from now on. The second: what a product reads in the backward pass is computed again where
    # only norms and elementwise operations lead to it; less memory, no slower (docs/performance.md).
    torch._functorch.config.activation_memory_budget = config.activation_memory_budget
    torch._functorch.config.ban_recompute_materialized_backward = False
    draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    for index, block in enumerate(model.get_submodule("layers").children()):
        if config.activation_checkpointing != "none" and index % config.checkpoint_every_k_blocks == 0:
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
            if config.activation_checkpointing == "selective":
                options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_or_recompute)
            block.forward = functools.partial(checkpoint, block.forward, **options)
        if config.compile:
            block.forward = torch.compile(block.forward)


def _keep_or_recompute(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation.name().split(".")[0] in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
