"""muP keeps activations and updates as large at every width, and leaves the standard model alone.

Shapes: B rows, T sequence, D d_model.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from parallel.engines.initial import fill_model
from train.config_file import recipe_from
from train.errors import ConfigError
from train.export.hugging_face import write_model
from train.model.attention_layer import Attention
from train.model.config import ModelConfig, MupConfig
from train.model.gpt import GPT, initial_value
from train.model.mup import folded
from train.optim.config import OptimConfig
from train.optim.groups import build_optimizer

SIZES: dict[str, Any] = {"vocab_size": 64, "seq_len": 16, "n_layers": 2, "n_heads": 4, "d_model": 64}
LLAMA = ModelConfig(**SIZES, n_kv_heads=2)
QWEN3 = ModelConfig(**SIZES, qk_norm=True, tied_embeddings=False)
GPT2 = ModelConfig(**SIZES, positions="learned", norm="layernorm", activation="gelu", bias=True)
WIDTHS = {"adamw": (64, 128, 256), "muon": (32, 64, 128)}
"""Widths of the coordinate check. Muon multiplies in bf16, for which few CPUs have products."""


def with_mup(config: ModelConfig, base_width: int) -> ModelConfig:
    return config.model_copy(update={"mup": MupConfig(base_width=base_width)})


def build(config: ModelConfig) -> GPT:
    model = GPT(config)
    fill_model(model, partial(initial_value, config=config, seed=1))
    return model


def inputs(rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and documents."""
    tokens_BT = torch.randint(0, 64, (rows, 16), generator=torch.Generator().manual_seed(2))
    return tokens_BT, torch.arange(16).expand_as(tokens_BT), torch.zeros_like(tokens_BT)


def train_steps(model: GPT, config: OptimConfig, steps: int) -> list[float]:
    """The loss before each step. The learning rate is constant."""
    optimizer = build_optimizer(model, config)
    optimizer.create_state()
    optimizer.set_lr(config.lr)
    labels_BT = inputs()[0].roll(-1, 1)
    losses: list[float] = []
    for _ in range(steps):
        loss = model(*inputs(), labels_BT).sum() / labels_BT.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("config", [LLAMA, QWEN3, GPT2])
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_at_the_base_width_only_the_scale_of_attention_differs(config: ModelConfig, algorithm: Any) -> None:
    optim = OptimConfig(lr=1e-2, algorithm=algorithm)
    mup, standard = build(with_mup(config, config.d_model)), build(config)
    for (name, ours), theirs in zip(mup.named_parameters(), standard.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    groups = [build_optimizer(model, optim).param_groups for model in (mup, standard)]
    kept = [
        {(p.numel(), g["weight_decay"], g["muon"], g["lr_scale"], g["eps"]) for g in each for p in g["params"]}
        for each in groups
    ]
    assert kept[0] == kept[1]
    scaled = [module for module in mup.modules() if isinstance(module, Attention)]
    assert [attention.query_multiplier for attention in scaled] == [1 / math.sqrt(config.head_dim)] * config.n_layers
    for attention in scaled:
        attention.query_multiplier = 1.0
    assert train_steps(mup, optim, 3) == train_steps(standard, optim, 3)


def changes(width: int, algorithm: Literal["adamw", "muon"], base_width: int | None, heads: int) -> dict[str, float]:
    """How much the output of each part changes over three steps, root mean square over tokens and features."""
    mup = None if base_width is None else MupConfig(base_width=base_width)
    config = ModelConfig(**{**SIZES, "d_model": width, "n_heads": heads}, mup=mup)
    model = build(config)
    outputs: dict[str, Tensor] = {}

    def keep(name: str, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        outputs[name] = output.detach().clone()

    for name in ("layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp", "head"):
        model.get_submodule(name).register_forward_hook(partial(keep, name))
    model(*inputs())
    before = dict(outputs)
    train_steps(model, OptimConfig(lr=1e-2, algorithm=algorithm, weight_decay=0.0), 3)
    model(*inputs())
    return {name: (outputs[name] - before[name]).square().mean().sqrt().item() for name in outputs}


def growth(algorithm: Literal["adamw", "muon"], base_width: int | None, heads: int | None = None) -> dict[str, float]:
    """The exponent g with which the change of each part grows as width^g, fitted over WIDTHS.

    `heads`: their number, so that they widen; by default their width is 16."""
    found = [changes(width, algorithm, base_width, heads or width // 16) for width in WIDTHS[algorithm]]
    widths = torch.tensor(WIDTHS[algorithm]).double().log()
    widths -= widths.mean()
    logs = {name: torch.tensor([each[name] for each in found]).double().log() for name in found[0]}
    return {name: float((widths @ values) / (widths @ widths)) for name, values in logs.items()}


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_activations_change_as_much_at_every_width(algorithm: Literal["adamw", "muon"]) -> None:
    """The coordinate check of Yang et al. 2022, appendix D.1."""
    flat, growing = growth(algorithm, base_width=WIDTHS[algorithm][0]), growth(algorithm, base_width=None)
    assert abs(flat["head"]) < 0.15, flat
    assert max(map(abs, flat.values())) < 0.35, flat
    assert min(growing.values()) > 0.45, growing


def test_heads_may_widen_instead_of_growing_in_number() -> None:
    flat = growth("adamw", base_width=64, heads=4)
    assert abs(flat["head"]) < 0.15, flat
    assert max(map(abs, flat.values())) < 0.35, flat


def test_wider_models_start_with_smaller_matrices_and_equal_embeddings() -> None:
    config = ModelConfig(**{**SIZES, "d_model": 512, "n_heads": 8})
    wide, standard = build(with_mup(config, 128)), build(config)
    ratio = {
        name: (ours.std() / theirs.std()).item()
        for (name, ours), theirs in zip(wide.named_parameters(), standard.parameters(), strict=True)
        if ours.dim() == 2
    }
    assert ratio.pop("embed.weight") == 1.0
    assert list(ratio.values()) == pytest.approx([0.5] * len(ratio))


@pytest.mark.parametrize(("algorithm", "scale"), [("adamw", 0.25), ("muon", 0.5)])
def test_matrices_in_blocks_have_a_learning_rate_of_their_own(algorithm: Any, scale: float) -> None:
    optim = OptimConfig(lr=1e-2, algorithm=algorithm, decay_embeddings=True)
    optimizer = build_optimizer(build(with_mup(LLAMA, 16)), optim)
    optimizer.set_lr(8e-3)
    matrices, tables, gains = optimizer.param_groups
    assert matrices["lr"] == 8e-3 * scale
    assert (tables["lr"], gains["lr"]) == (8e-3, 8e-3)
    assert matrices["lr"] * matrices["weight_decay"] == pytest.approx(8e-3 * 0.1)
    assert (tables["weight_decay"], gains["weight_decay"]) == (0.1, 0.0)
    assert {group["eps"] for group in optimizer.param_groups} == {1e-8 / 4}
    assert [len(group["params"]) for group in (matrices, tables)] == [2 * 7, 1]


@pytest.mark.parametrize("config", [LLAMA, QWEN3, GPT2, LLAMA.model_copy(update={"bias": True})])
def test_an_exported_model_has_the_multipliers_in_its_weights(config: ModelConfig, tmp_path: Path) -> None:
    config = with_mup(config, 16)
    model = build(config)
    train_steps(model, OptimConfig(lr=3e-2), 10)  # so that logits are far from zero
    write_model(dict(model.named_parameters()), config, vocab_size=64, end_of_document=2, folder=tmp_path)
    theirs_BTV = AutoModelForCausalLM.from_pretrained(tmp_path)(inputs()[0]).logits
    ours_BTV = model(*inputs())
    assert ours_BTV.abs().max() > 0.5
    torch.testing.assert_close(theirs_BTV, ours_BTV, atol=1e-5, rtol=1e-5)


def test_folding_by_powers_of_two_changes_no_bit_of_the_logits() -> None:
    config = with_mup(LLAMA, 16)  # ratio 4, head width 16
    model = build(config)
    train_steps(model, OptimConfig(lr=3e-2), 10)
    standard = GPT(LLAMA)
    standard.load_state_dict(folded(model.state_dict(), config))
    assert torch.equal(standard(*inputs()), model(*inputs()))


def test_a_base_width_must_be_positive() -> None:
    tree: dict[str, Any] = {"model": {**SIZES, "mup": {"base_width": "0"}}}
    with pytest.raises(ConfigError, match=r"model\.mup\.base_width \('0'\): input should be greater than 0"):
        recipe_from(tree)
