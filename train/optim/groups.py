"""The optimizer over a model's parameters, in groups by algorithm, weight decay and, with muP, learning rate."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallel.optimizer import EngineOptimizer
from train.model.config import ModelConfig
from train.model.gpt import GPT, parameter_of
from train.model.mup import lr_scale, width_ratio
from train.model.names import plain_name
from train.model.parameters import Parameter
from train.optim.adamw import FusedAdamW
from train.optim.config import OptimConfig
from train.optim.muon import MuonAdamW

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that one algorithm updates with one weight decay and one learning rate."""

    names: tuple[str, ...]
    """Plain names, in the order of the model."""
    weight_decay: float
    muon: bool = False
    lr_scale: float = 1.0
    """Factor of the learning rate."""


def group_names(parameters: Mapping[str, Parameter], config: OptimConfig, model: ModelConfig) -> list[ParamGroup]:
    """The groups that are not empty, from the declarations of parameters by plain name.

    Declarations do not depend on sharding, flattening or compiling, so neither do groups. With muP the matrices inside
    blocks have a learning rate of their own."""
    by_muon = [name for name, one in parameters.items() if config.algorithm == "muon" and _takes_muon(one)]
    others = [name for name in parameters if name not in by_muon]
    decaying = [name for name in others if _decays(parameters[name], config)]
    by_mup = [name for name in decaying if model.mup and parameters[name].kind == "matrix"]
    groups = [
        _scaled(by_muon, config, model, muon=True),
        _scaled(by_mup, config, model, muon=False),
        ParamGroup(tuple(name for name in decaying if name not in by_mup), config.weight_decay),
        ParamGroup(tuple(name for name in others if name not in decaying), 0.0),
    ]
    return [group for group in groups if group.names]


def _scaled(names: list[str], config: OptimConfig, model: ModelConfig, *, muon: bool) -> ParamGroup:
    """A group of matrices inside blocks. The product of learning rate and weight decay does not depend on the width."""
    scale = lr_scale(model, muon=muon)
    return ParamGroup(tuple(names), config.weight_decay / scale, muon=muon, lr_scale=scale)


def _takes_muon(parameter: Parameter) -> bool:
    return parameter.kind == "matrix" and len(parameter.shape) == 2


def _decays(parameter: Parameter, config: OptimConfig) -> bool:
    return parameter.kind == "matrix" or (parameter.kind == "table" and config.decay_embeddings)


def build_optimizer(model: nn.Module, config: OptimConfig) -> EngineOptimizer:
    """The optimizer that the recipe names, over the parameters of a GPT as they are after wrapping."""
    gpt = next(module for module in model.modules() if isinstance(module, GPT))
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    for group in group_names({name: parameter_of(name, gpt.config) for name in parameters}, config, gpt.config):
        members = [parameters[name] for name in group.names]
        settings = {"weight_decay": group.weight_decay, "muon": group.muon, "lr_scale": group.lr_scale}
        groups.append({"params": members, **settings})
        log.info(
            "%d tensors with %d parameters: weight decay %g%s%s",
            len(members),
            sum(parameter.numel() for parameter in members),
            group.weight_decay,
            ", updated by Muon" if group.muon else "",
            f", {group.lr_scale:g} x optim.lr" if group.lr_scale != 1.0 else "",
        )
    eps = config.eps / width_ratio(gpt.config)
    match config.algorithm:
        case "adamw":
            return FusedAdamW(groups, lr=config.lr, betas=config.betas, eps=eps, ema_decay=config.ema_decay)
        case "muon":
            return MuonAdamW(groups, lr=config.lr, betas=config.betas, eps=eps, ema_decay=config.ema_decay)
