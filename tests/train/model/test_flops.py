"""Counts of parameters, products and FLOP agree with each other. Case 25."""

from typing import Any

import pytest
import torch

from train.model.config import ModelConfig
from train.model.flops import count_parameters, flops_per_token, measure_matmul_peak, step_products

SIZES: dict[str, Any] = {"vocab_size": 512, "seq_len": 32, "n_layers": 3, "n_heads": 4, "d_model": 64}


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(**SIZES, norm="layernorm", positions="learned", activation="gelu"),
        ModelConfig(**SIZES, n_kv_heads=2, tied_embeddings=False),
    ],
)
def test_products_hold_every_parameter_that_is_multiplied(config: ModelConfig) -> None:
    matrices = sum(times * rows * columns for times, rows, columns in step_products(config))
    norms = config.d_model * (2 * config.n_layers + 1)
    lookups = config.seq_len * config.d_model if config.positions == "learned" else 0
    lookups += 0 if config.tied_embeddings else config.vocab_size * config.d_model
    assert matrices == count_parameters(config) - norms - lookups


def test_gpt2_small_has_its_published_size_and_work() -> None:
    gpt2 = ModelConfig(
        vocab_size=50_257,
        seq_len=1024,
        n_layers=12,
        n_heads=12,
        d_model=768,
        positions="learned",
        norm="layernorm",
        activation="gelu",
        bias=True,
    )
    assert count_parameters(gpt2) == 124_439_808
    assert flops_per_token(gpt2) == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024


def test_the_peak_is_a_rate_that_a_machine_can_have() -> None:
    assert 1e8 < measure_matmul_peak(torch.device("cpu"), torch.float32, seconds=0.05) < 1e16
