"""Muon updates matrices by orthogonal steps as large as AdamW's; AdamW updates the rest."""

import pytest
import torch
from torch import Tensor, nn

from train.model.config import ModelConfig
from train.model.gpt import GPT
from train.optim.config import OptimConfig
from train.optim.groups import build_optimizer
from train.optim.muon import MuonAdamW, orthogonal

MUON = OptimConfig(lr=1e-2, algorithm="muon", weight_decay=0.1)
MODEL = ModelConfig(vocab_size=64, seq_len=16, n_layers=2, n_heads=2, d_model=32, tied_embeddings=False)


@pytest.mark.parametrize("shape", [(48, 48), (32, 96), (96, 32)])
def test_singular_values_of_an_update_are_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert orthogonal(matrix).shape == shape
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert (values > 0.3).all()
    assert (values < 1.3).all()
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    aligned = (left.T @ orthogonal(matrix) @ right.T).diagonal()
    torch.testing.assert_close(aligned, values.sort().values[aligned.argsort().argsort()], atol=0.05, rtol=0.05)


def test_muon_takes_the_matrices_in_blocks_and_adamw_the_rest() -> None:
    model = GPT(MODEL)
    optimizer = build_optimizer(model, MUON)
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_muon = {names[p] for group in optimizer.param_groups if group["muon"] for p in group["params"]}
    assert by_muon == {name for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2}
    assert len(by_muon) == 2 * 7
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)


def test_one_step_equals_the_formula() -> None:
    weight = nn.Parameter(torch.eye(4, 8))
    optimizer = MuonAdamW([{"params": [weight], "weight_decay": 0.5, "muon": True}], lr=0.1)
    optimizer.create_state()
    assert set(optimizer.state[weight]) == {"step", "exp_avg"}
    gradient = torch.randn(4, 8, generator=torch.Generator().manual_seed(4))
    weight.grad = gradient.clone()
    optimizer.step()
    update = orthogonal((1.95 * gradient).bfloat16()).float() * 0.2 * 8**0.5
    torch.testing.assert_close(weight.detach(), torch.eye(4, 8) * 0.95 - 0.1 * update, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], gradient)
    assert optimizer.state[weight]["step"].item() == 1


def test_a_model_learns_with_muon() -> None:
    torch.manual_seed(0)
    model = GPT(MODEL)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    optimizer = build_optimizer(model, MUON)
    optimizer.create_state()
    tokens_BT = torch.arange(17).repeat(4, 1)
    positions_BT = torch.arange(16).repeat(4, 1)

    def loss() -> Tensor:
        return model(tokens_BT[:, :-1], positions_BT, torch.zeros_like(positions_BT), tokens_BT[:, 1:]).sum() / 64

    first = loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < first / 4
