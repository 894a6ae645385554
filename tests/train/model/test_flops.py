"""Counts of parameters, products and FLOP agree with each other and with the built model."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train.model.flops
from train.model.block import Block
from train.model.config import ModelConfig
from train.model.flops import count_parameters, flops_per_token, measure_matmul_peak, step_products
from train.model.gpt import GPT, parameter_of

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


@pytest.mark.parametrize("has_extras", [True, False])
@pytest.mark.parametrize("tied_embeddings", [True, False])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_declarations_are_the_parameters_of_the_built_model(
    activation: Any, norm: Any, tied_embeddings: bool, has_extras: bool
) -> None:
    config = ModelConfig(
        **SIZES,
        n_kv_heads=2,
        positions="learned",
        activation=activation,
        norm=norm,
        tied_embeddings=tied_embeddings,
        bias=has_extras,
        qk_norm=has_extras,
    )
    with torch.device("meta"):
        built = {name: tuple(parameter.shape) for name, parameter in GPT(config).named_parameters()}
    assert {name: parameter_of(name, config).shape for name in built} == built
    assert len(GPT.declare(config)) + config.n_layers * len(Block.declare(config)) == len(built)


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
    assert flops_per_token(gpt2) == 6 * (124_439_808 - 1024 * 768) + 12 * 6 * 768 * 1024


def test_the_measured_peak_is_a_possible_rate() -> None:
    assert 1e8 < measure_matmul_peak(torch.device("cpu"), torch.float32, seconds=0.05) < 1e16


def test_the_peak_is_measured_in_the_precision_that_the_model_multiplies_in(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                seen.add(args[0].dtype)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(train.model.flops, "SLOW", frozenset({torch.float64}))
    for dtype in (torch.float64, torch.float32):
        with Products():
            measure_matmul_peak(torch.device("cpu"), dtype, seconds=0.0)
        assert seen == {torch.float32}
