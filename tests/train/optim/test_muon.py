"""Muon updates matrices by orthogonal steps as large as AdamW's; AdamW updates the rest."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.ranks import run_ranks
from tests.train.optim.muon_ranks import step
from train.model.config import ModelConfig
from train.model.gpt import GPT
from train.optim.config import OptimConfig
from train.optim.dealt import rounds, work_of
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


LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "fsdp2": {"engine": "fsdp2"},
    "hsdp": {"engine": "fsdp2", "replicate": 2},
    "tensor and shard": {"engine": "fsdp2", "tensor": 2},
    "tensor and replicate": {"engine": "ddp", "tensor": 2},
    "replicate": {"engine": "fsdp2", "replicate": 4},
}
"""Layouts of four ranks."""
DEALT_OVER = {"hsdp": 2, "tensor and replicate": 2}
"""Number of ranks that hold one copy of a matrix together, where it is not 4."""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return step({"engine": "single"})


@pytest.fixture(scope="module")
def in_layouts() -> list[dict[str, Any]]:
    return run_ranks("tests/train/optim/muon_ranks.py", "step_each", 4, LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_has_the_same_bits_in_every_layout(
    in_layouts: list[dict[str, Any]], alone: dict[str, Any], name: str
) -> None:
    """104 rows of d_ff and 40 of d_model: some ranks hold fewer rows than others."""
    for rank in in_layouts:
        for weight, value in alone["weights"].items():
            assert torch.equal(rank[name]["weights"][weight], value), weight


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_does_its_share_of_the_work(
    in_layouts: list[dict[str, Any]], alone: dict[str, Any], name: str
) -> None:
    """Shares differ by less than the largest matrix, and ranks that hold copies in parts repeat nothing else."""
    dealt_over = DEALT_OVER.get(name, 4)
    shares = [rank[name]["work"] for rank in in_layouts]
    assert sum(shares) == alone["work"] * 4 / dealt_over
    assert max(shares) - min(shares) <= 2 * alone["largest"], "in each of two steps"


def test_matrices_are_dealt_by_size() -> None:
    sizes = [(4096, 4096)] * 9 + [(4096, 14336)] * 7 + [(1024, 4096)] * 5
    shares = [0] * 4
    dealt = list(rounds([torch.empty(size, device="meta") for size in sizes], 4))
    for matrices in dealt:
        for owner, matrix in enumerate(matrices):
            shares[owner] += work_of(matrix.shape)
    assert sum(map(len, dealt)) == len(sizes)
    assert all(len(matrices) <= 4 for matrices in dealt)
    assert max(shares) - min(shares) <= work_of((4096, 14336))
