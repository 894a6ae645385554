"""AdamW, or Muon with AdamW, with weight decay on matrices only."""

import logging
from dataclasses import dataclass

from torch import nn

from train.model.names import plain_name
from train.optim.adamw import FusedAdamW
from train.optim.config import OptimConfig
from train.optim.muon import MuonAdamW

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParamGroup:
    names: tuple[str, ...]
    weight_decay: float
    muon: bool = False


def group_names(names: list[str], config: OptimConfig) -> list[ParamGroup]:
    """Groups by name, so that sharding, flattening and compiling cannot change them."""
    matrices = [name for name in names if config.algorithm == "muon" and _is_matrix_in_block(name)]
    others = [name for name in names if name not in matrices]
    groups = [
        ParamGroup(tuple(matrices), config.weight_decay, muon=True),
        ParamGroup(tuple(name for name in others if _decays(name, config)), config.weight_decay),
        ParamGroup(tuple(name for name in others if not _decays(name, config)), 0.0),
    ]
    return [group for group in groups if group.names]


def _is_matrix_in_block(name: str) -> bool:
    *_, module, kind = name.split(".")
    return name.startswith("layers.") and kind == "weight" and "norm" not in module


def _decays(name: str, config: OptimConfig) -> bool:
    *_, module, kind = name.split(".")
    if kind == "bias" or "norm" in module:
        return False
    return config.decay_embeddings or module not in ("embed", "positions", "head")


def build_optimizer(model: nn.Module, config: OptimConfig) -> FusedAdamW:
    """AdamW, or Muon with AdamW, over the parameters as they stand after wrapping."""
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    groups = group_names(list(parameters), config)
    for group in groups:
        count = sum(parameters[name].numel() for name in group.names)
        algorithm = "Muon" if group.muon else "AdamW"
        log.info(
            "%s, weight decay %g: %d tensors, %d parameters", algorithm, group.weight_decay, len(group.names), count
        )
    optimizer = MuonAdamW if config.algorithm == "muon" else FusedAdamW
    return optimizer(
        [
            {
                "params": [parameters[name] for name in group.names],
                "weight_decay": group.weight_decay,
                "muon": group.muon,
            }
            for group in groups
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
    )
