"""Weight decay applies to matrices only, and the groups hold every parameter once."""

import pytest
import torch
from torch import nn

from train.model.config import ModelConfig
from train.model.gpt import GPT, parameter_of
from train.model.names import plain_name
from train.model.parameters import Parameter
from train.optim.config import OptimConfig
from train.optim.groups import build_optimizer, group_names

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


def declared(config: ModelConfig) -> dict[str, Parameter]:
    with torch.device("meta"):
        return {name: parameter_of(name, config) for name, _ in GPT(config).named_parameters()}


def test_norms_and_biases_never_decay_and_every_parameter_is_in_one_group() -> None:
    names = declared(GPT2)
    decayed, rest = group_names(names, OPTIM, GPT2)
    assert sorted(decayed.names + rest.names) == sorted(names)
    assert (decayed.weight_decay, rest.weight_decay) == (0.1, 0.0)
    assert all(name.endswith("weight") and "norm" not in name for name in decayed.names)
    assert len(decayed.names) == 2 * 6  # query, key, value, output, up, down of two blocks
    assert {"embed.weight", "head.weight", "positions.weight"} <= set(rest.names)


def test_embeddings_decay_when_asked() -> None:
    decayed, _ = group_names(declared(GPT2), OPTIM.model_copy(update={"decay_embeddings": True}), GPT2)
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


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_a_step_has_the_bits_of_torchs_own_adamw(algorithm: str) -> None:
    """Compares AdamW's groups. test_muon.py tests the matrices of Muon."""
    config = OptimConfig(lr=3e-3, algorithm=algorithm, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)  # pyright: ignore[reportArgumentType]
    ours, theirs = GPT(GPT2), GPT(GPT2)
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, config)
    twins = dict(zip(ours.parameters(), theirs.parameters(), strict=True))
    groups = [group for group in optimizer.param_groups if not group["muon"]]
    torchs = torch.optim.AdamW(
        [{"params": [twins[p] for p in g["params"]], "weight_decay": g["weight_decay"]} for g in groups],
        lr=3e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    optimizer.create_state()
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for parameter, twin in twins.items():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            twin.grad = parameter.grad.clone()
        optimizer.step()
        torchs.step()
    for group in groups:
        for parameter in group["params"]:
            assert torch.equal(parameter, twins[parameter])
            assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], torchs.state[twins[parameter]]["exp_avg_sq"])
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in ours.parameters())
