"""AdamW with weight decay on matrices only."""

import logging
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from train.config import OptimConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParamGroup:
    names: tuple[str, ...]
    weight_decay: float


def group_names(names: list[str], config: OptimConfig) -> list[ParamGroup]:
    """Two groups by name, so that sharding, flattening and compiling cannot change them."""
    decayed = [name for name in names if _decays(name, config)]
    rest = [name for name in names if not _decays(name, config)]
    groups = [ParamGroup(tuple(decayed), config.weight_decay), ParamGroup(tuple(rest), 0.0)]
    return [group for group in groups if group.names]


def _decays(name: str, config: OptimConfig) -> bool:
    *_, module, kind = name.split(".")
    if kind == "bias" or "norm" in module:
        return False
    return config.decay_embeddings or module not in ("embed", "positions", "head")


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "module."):
        name = name.replace(wrapper, "")
    return name


def build_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Fused AdamW (Loshchilov and Hutter 2019) over the parameters as they stand after wrapping."""
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    groups = group_names(list(parameters), config)
    for group in groups:
        count = sum(parameters[name].numel() for name in group.names)
        log.info("weight decay %g: %d tensors, %d parameters", group.weight_decay, len(group.names), count)
    return AdamW(
        [
            {"params": [parameters[name] for name in group.names], "weight_decay": group.weight_decay}
            for group in groups
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=all(parameter.dtype != torch.float16 for parameter in parameters.values()),
    )
