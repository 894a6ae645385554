"""The model computes what its settings define."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from data_pipeline.stream.batch import IGNORE
from parallel.engines.initial import fill_model
from train.model.config import ModelConfig
from train.model.flops import count_parameters
from train.model.gpt import GPT, initial_value, metric_names
from train.model.rope import rope_rotation

SIZES: dict[str, Any] = {"vocab_size": 512, "seq_len": 32, "n_layers": 2, "n_heads": 4, "d_model": 64}
LLAMA = ModelConfig(**SIZES, n_kv_heads=2)
GPT2 = ModelConfig(**SIZES, positions="learned", norm="layernorm", activation="gelu", bias=True)
STYLES = [
    LLAMA,
    GPT2,
    ModelConfig(**SIZES, qk_norm=True, tied_embeddings=False),
    ModelConfig(**SIZES, bias=True),
    ModelConfig(**SIZES, positions="learned", norm="layernorm", tied_embeddings=False),
]


def build(config: ModelConfig) -> GPT:
    model = GPT(config)
    fill_model(model, partial(initial_value, config=config, seed=1))
    return model


def values(name: str, config: ModelConfig, seed: int = 1, count: int = 512 * 512) -> Tensor:
    """The first initial values of a parameter."""
    return initial_value(name, torch.arange(count // 2), config, seed)


def random_tokens(config: ModelConfig, rows: int = 2) -> Tensor:
    return torch.randint(0, config.vocab_size, (rows, config.seq_len), generator=torch.Generator().manual_seed(5))


def positions(documents_BT: Tensor) -> Tensor:
    """Positions that start at 0 in each document."""
    index_BT = torch.arange(documents_BT.shape[1]).expand_as(documents_BT)
    starts = documents_BT.diff(dim=1, prepend=documents_BT[:, :1] - 1) != 0
    return index_BT - torch.where(starts, index_BT, 0).cummax(dim=1).values


@pytest.mark.parametrize("config", STYLES)
def test_the_first_loss_is_near_the_logarithm_of_the_vocabulary(config: ModelConfig) -> None:
    tokens_BT = random_tokens(config, rows=8)
    documents_BT = torch.zeros_like(tokens_BT)
    loss_B = build(config)(tokens_BT, positions(documents_BT), documents_BT, tokens_BT.roll(-1, 1))
    assert loss_B.sum().item() / tokens_BT.numel() == pytest.approx(math.log(config.vocab_size), abs=0.05)


@pytest.mark.parametrize(("vocab_size", "loss"), [(50_257, 10.825), (32_000, 10.374)])
def test_the_first_loss_at_published_vocabularies(vocab_size: int, loss: float) -> None:
    config = LLAMA.model_copy(update={"vocab_size": vocab_size})
    tokens_BT = random_tokens(config, rows=8)
    zeros_BT = torch.zeros_like(tokens_BT)
    loss_B = build(config)(tokens_BT, positions(zeros_BT), zeros_BT, tokens_BT.roll(-1, 1))
    assert loss_B.sum().item() / tokens_BT.numel() == pytest.approx(loss, abs=0.05)


def test_residual_outputs_start_smaller_by_the_root_of_twice_the_layers() -> None:
    config = ModelConfig(vocab_size=64, seq_len=8, n_layers=12, n_heads=4, d_model=512)
    for name in ("layers.3.attention.output.weight", "layers.3.mlp.down.weight"):
        assert values(name, config).std().item() == pytest.approx(0.00408, rel=0.01)
    assert values("layers.3.mlp.up.weight", config).std().item() == pytest.approx(0.02, rel=0.01)


def test_initial_values_depend_only_on_seed_name_and_number() -> None:
    first = values("layers.0.mlp.up.weight", LLAMA)
    found = initial_value("layers.0.mlp.up.weight", torch.tensor([[7, 1], [512, 3]]), LLAMA, 1)
    assert torch.equal(found, first[torch.tensor([[14, 15, 2, 3], [1024, 1025, 6, 7]])])
    for other in (values("layers.1.mlp.up.weight", LLAMA), values("layers.0.mlp.up.weight", LLAMA, seed=2)):
        correlation = torch.corrcoef(torch.stack((first, other)))[0, 1].item()
        assert abs(correlation) < 0.01, "different names and seeds are independent"
    assert torch.equal(values("norm.weight", LLAMA, count=4), torch.ones(4))


@pytest.mark.parametrize("config", STYLES)
def test_the_counted_parameters_are_those_of_the_built_model(config: ModelConfig) -> None:
    assert count_parameters(config) == sum(parameter.numel() for parameter in GPT(config).parameters())


@pytest.mark.parametrize("config", [LLAMA, GPT2])
def test_two_documents_in_one_row_give_the_logits_of_each_alone(config: ModelConfig) -> None:
    model, tokens_BT = build(config), random_tokens(config, rows=1)
    documents_BT = (torch.arange(32) >= 20).long()[None]
    packed_BTV = model(tokens_BT, positions(documents_BT), documents_BT)
    for part in (tokens_BT[:, :20], tokens_BT[:, 20:]):
        zeros_BT = torch.zeros_like(part)
        alone_BTV = model(part, positions(zeros_BT), zeros_BT)
        packed_part = packed_BTV[:, :20] if part.shape[1] == 20 else packed_BTV[:, 20:]
        torch.testing.assert_close(alone_BTV, packed_part, atol=1e-6, rtol=1e-5)


def test_a_token_sees_no_later_token() -> None:
    model, tokens_BT = build(LLAMA), random_tokens(LLAMA, rows=1)
    zeros_BT = torch.zeros_like(tokens_BT)
    changed_BT = tokens_BT.clone()
    changed_BT[:, 20] += 1
    before, after = (model(t % 512, positions(zeros_BT), zeros_BT) for t in (tokens_BT, changed_BT))
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_tied_embeddings_are_one_parameter_whose_gradient_has_both_parts() -> None:
    tied, untied = build(LLAMA), build(LLAMA.model_copy(update={"tied_embeddings": False}))
    assert tied.head.weight is tied.embed.weight
    untied.head.weight.data.copy_(untied.embed.weight.data)
    tokens_BT = random_tokens(LLAMA)
    zeros_BT = torch.zeros_like(tokens_BT)
    for model in (tied, untied):
        model(tokens_BT, positions(zeros_BT), zeros_BT, tokens_BT.roll(-1, 1)).sum().backward()
    assert tied.embed.weight.grad is not None
    assert untied.embed.weight.grad is not None
    assert untied.head.weight.grad is not None
    torch.testing.assert_close(tied.embed.weight.grad, untied.embed.weight.grad + untied.head.weight.grad)


def test_rope_is_exact_in_bf16_runs() -> None:
    config = ModelConfig(vocab_size=8, seq_len=4096, n_layers=1, n_heads=1, d_model=128)
    positions_BT = torch.arange(4096)[None]
    with torch.autocast("cpu", torch.bfloat16):
        cos, _ = rope_rotation(positions_BT, config)
    exponent = torch.arange(0, 128, 2, dtype=torch.float64) / 128
    exact = (positions_BT.double()[..., None, None] * 10_000.0**-exponent).cos()
    assert cos.dtype == torch.float32
    assert (cos.double() - exact).abs().max().item() < 1e-3


def test_rows_without_targets_give_zero_loss_and_zero_gradient() -> None:
    model, tokens_BT = build(LLAMA), random_tokens(LLAMA)
    zeros_BT = torch.zeros_like(tokens_BT)
    loss_B = model(tokens_BT, positions(zeros_BT), zeros_BT, torch.full_like(tokens_BT, IGNORE))
    loss_B.sum().backward()
    assert loss_B.tolist() == [0.0, 0.0]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_todays_blocks_report_no_metrics() -> None:
    assert metric_names(LLAMA) == metric_names(GPT2) == ()
