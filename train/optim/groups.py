"""The optimizer over a model's parameters, in groups by algorithm and weight decay."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallel.optimizer import EngineOptimizer
from train.model.gpt import GPT, parameter_of
from train.model.names import plain_name
from train.model.parameters import Parameter
from train.optim.adamw import FusedAdamW
from train.optim.config import OptimConfig
from train.optim.muon import MuonAdamW

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that one algorithm updates with one weight decay."""

    names: tuple[str, ...]
    """Plain names, in the order of the model."""
    weight_decay: float
    muon: bool = False


def group_names(parameters: Mapping[str, Parameter], config: OptimConfig) -> list[ParamGroup]:
    """The groups that are not empty, from the declarations of parameters by plain name.

    Declarations do not depend on sharding, flattening or compiling, so neither do groups."""
    matrices = [name for name, one in parameters.items() if config.algorithm == "muon" and _takes_muon(one)]
    others = [name for name in parameters if name not in matrices]
    groups = [
        ParamGroup(tuple(matrices), config.weight_decay, muon=True),
        ParamGroup(tuple(name for name in others if _decays(parameters[name], config)), config.weight_decay),
        ParamGroup(tuple(name for name in others if not _decays(parameters[name], config)), 0.0),
    ]
    return [group for group in groups if group.names]


def _takes_muon(parameter: Parameter) -> bool:
    return parameter.kind == "matrix" and len(parameter.shape) == 2


def _decays(parameter: Parameter, config: OptimConfig) -> bool:
    return parameter.kind == "matrix" or (parameter.kind == "table" and config.decay_embeddings)


def build_optimizer(model: nn.Module, config: OptimConfig) -> EngineOptimizer:
    """The optimizer that the recipe names, over the parameters of a GPT as they are after wrapping."""
    gpt = next(module for module in model.modules() if isinstance(module, GPT))
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    for group in group_names({name: parameter_of(name, gpt.config) for name in parameters}, config):
        members = [parameters[name] for name in group.names]
        groups.append({"params": members, "weight_decay": group.weight_decay, "muon": group.muon})
        log.info(
            "%d tensors with %d parameters: weight decay %g%s",
            len(members),
            sum(parameter.numel() for parameter in members),
            group.weight_decay,
            ", updated by Muon" if group.muon else "",
        )
    match config.algorithm:
        case "adamw":
            return FusedAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        case "muon":
            return MuonAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
