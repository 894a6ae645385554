"""Weight decay touches matrices only, and the groups hold every parameter once. Case 25."""

import pytest
import torch
from torch import nn

from train.config import ModelConfig, OptimConfig
from train.model import GPT
from train.names import plain_name
from train.optim import build_optimizer, group_names

OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1)
GPT2 = ModelConfig(
    vocab_size=64,
    seq_len=16,
    n_layers=2,
    n_heads=2,
    d_model=16,
    positions="learned",
    norm="layernorm",
    activation="gelu",
    bias=True,
    tied_embeddings=False,
)


def names_of(config: ModelConfig) -> list[str]:
    with torch.device("meta"):
        return [name for name, _ in GPT(config).named_parameters()]


def test_norms_and_biases_never_decay_and_every_parameter_stands_once() -> None:
    names = names_of(GPT2)
    decayed, rest = group_names(names, OPTIM)
    assert sorted(decayed.names + rest.names) == sorted(names)
    assert (decayed.weight_decay, rest.weight_decay) == (0.1, 0.0)
    assert all(name.endswith("weight") and "norm" not in name for name in decayed.names)
    assert len(decayed.names) == 2 * 6  # query, key, value, output, up, down of two blocks
    assert {"embed.weight", "head.weight", "positions.weight"} <= set(rest.names)


def test_embeddings_decay_when_asked() -> None:
    decayed, _ = group_names(names_of(GPT2), OPTIM.model_copy(update={"decay_embeddings": True}))
    assert {"embed.weight", "head.weight", "positions.weight"} <= set(decayed.names)


def test_groups_do_not_depend_on_compiling_or_wrapping() -> None:
    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    plain, wrapped = GPT(GPT2), Wrapped(torch.compile(GPT(GPT2)))  # pyright: ignore[reportArgumentType]
    sizes = [
        [sum(p.numel() for p in g["params"]) for g in build_optimizer(m, OPTIM).param_groups] for m in (plain, wrapped)
    ]
    assert sizes[0] == sizes[1]
    assert sum(sizes[0]) == sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("_orig_mod.module._orig_mod.x", "x"),
        ("layers.0._checkpoint_wrapped_module.mlp.up.weight", "layers.0.mlp.up.weight"),
    ],
)
def test_plain_names_lose_every_wrapper(wrapped: str, plain: str) -> None:
    assert plain_name(wrapped) == plain
