"""Converts the tensors of a source to the state of the recipe's model and optimizer. Pure: no files."""

from dataclasses import dataclass

import torch
from torch import Tensor

from train.checkpoint.importing.names import Layout, translate
from train.checkpoint.importing.source import Source
from train.config import Recipe
from train.errors import CheckpointError
from train.model.config import ModelConfig
from train.model.gpt import GPT
from train.optim.average import AVERAGE
from train.optim.groups import build_optimizer

_SHOWN = 5
"""Names that an error message lists."""


@dataclass(frozen=True)
class Converted:
    """The complete state of the recipe's model and optimizer as engines name it, fp32, on the host."""

    state: dict[str, Tensor]
    parameters: int
    """Number of parameters (tensors) of the model."""
    restored: int
    """How many of them have the source's optimizer state; that of the others starts anew."""


def convert(source: Source, layout: Layout, recipe: Recipe, location: str) -> Converted:
    """Convert a source; `location` names it. CheckpointError if its weights are not those of the recipe's model."""
    if recipe.model.n_layers > len(source.weights):  # before so many layers are built
        raise CheckpointError(
            f"the recipe's model.n_layers is {recipe.model.n_layers}, but {location} has {len(source.weights)} tensors"
        )
    with torch.device("meta"):
        model = GPT(recipe.model)
    optimizer = build_optimizer(model, recipe.optim)
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    parameters = dict(model.named_parameters())
    weights = weights_of(source, layout, recipe.model, parameters, location)
    moments = {
        kind: translate(found, layout, recipe.model) for kind, found in source.optimizer.items() if kind != "step"
    }
    step = torch.tensor(float(source.step))
    state: dict[str, Tensor] = {}
    restored = 0
    for name, parameter in parameters.items():
        state[f"model.{name}"] = weights[name]
        own = optimizer.new_state(weights[name], groups[parameter]) | {"step": step.clone()}
        if AVERAGE in own:
            own[AVERAGE] = weights[name].clone()
        found = {kind: tensors[name] for kind, tensors in moments.items() if name in tensors}
        # Else another algorithm made them: Muon's momentum is not AdamW's.
        if found.keys() == own.keys() - {"step", AVERAGE}:
            restored += 1
            own |= {kind: _fitted(name, tensor, own[kind].shape, location) for kind, tensor in found.items()}
        state |= {f"optim.{name}.{kind}": tensor for kind, tensor in own.items()}
    return Converted(state, len(parameters), restored)


def weights_of(
    source: Source, layout: Layout, config: ModelConfig, parameters: dict[str, torch.nn.Parameter], location: str
) -> dict[str, Tensor]:
    """A weight for each parameter of the model, of its shape."""
    weights = translate(source.weights, layout, config)
    head = weights.pop("head.weight", None) if "head.weight" not in parameters else None
    if head is not None and "embed.weight" in weights and not torch.equal(head, weights["embed.weight"]):
        raise CheckpointError(
            f"{location} has an output head of its own, but the recipe's model.tied_embeddings is true, which would "
            "drop it; set model.tied_embeddings to false"
        )
    missing, unexpected = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    if missing == ["head.weight"] and not unexpected:
        raise CheckpointError(
            f"{location} has no output head, because it shares the embedding's matrix, but the recipe's "
            "model.tied_embeddings is false; set model.tied_embeddings to true"
        )
    if missing or unexpected:
        raise CheckpointError(
            f"the weights in {location} are not those of the recipe's model: {len(missing)} missing "
            f"({', '.join(missing[:_SHOWN])}), {len(unexpected)} unexpected ({', '.join(unexpected[:_SHOWN])})"
        )
    return {name: _fitted(name, weights[name], parameter.shape, location) for name, parameter in parameters.items()}


def _fitted(name: str, tensor: Tensor, shape: torch.Size, location: str) -> Tensor:
    """The tensor in fp32 and in the wanted shape. Embedding and head get rows of zeros, or lose them."""
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise CheckpointError(
            f"{name} has the type {tensor.dtype} in {location}; only fp16, bf16, fp32 and fp64 are read: a quantized "
            "model cannot be trained, so import the model that it was made from"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{name} has values in {location} that are not finite; import an earlier checkpoint of it"
        )
    rows = min(shape[0], tensor.shape[0]) if tensor.dim() and shape else 0
    if tensor.shape != shape and name in ("embed.weight", "head.weight") and tensor.shape[1:] == shape[1:]:
        if bool(tensor[rows:].any()):
            raise CheckpointError(
                f"{name} has {tensor.shape[0]} rows in {location}, but model.vocab_size is {shape[0]}, which would "
                f"drop tokens; set model.vocab_size to at least {tensor.shape[0]}"
            )
        padded = torch.zeros(shape)
        padded[:rows] = tensor[:rows]
        return padded
    if tensor.shape != shape:
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)} in {location}, {tuple(shape)} in the recipe's model"
        )
    return tensor.float().contiguous()
