"""Names and layouts of other systems: RoPE's pairs, flat tensors, transposed matrices."""

import pytest
import torch
from torch import Tensor

from train.checkpoint.importing.names import TORCHTITAN, Layout, Rope, layout_of, translate
from train.errors import CheckpointError
from train.model.config import ModelConfig
from train.model.gpt import GPT

LLAMA = ModelConfig(vocab_size=48, seq_len=16, n_layers=1, n_heads=4, n_kv_heads=2, d_model=32, d_ff=64)
QWEN3 = LLAMA.model_copy(update={"qk_norm": True})
BIASED = LLAMA.model_copy(update={"bias": True})
GPT2 = ModelConfig(
    vocab_size=48, seq_len=16, n_layers=1, n_heads=4, d_model=32, positions="learned", norm="layernorm",
    activation="gelu", bias=True,
)  # fmt: skip


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    return {name: torch.randn_like(parameter) for name, parameter in GPT(config).named_parameters()}


def as_torchtitan(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    theirs: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        module = name.removeprefix("layers.0.").rpartition(".")[0]
        theirs[name.replace(module, TORCHTITAN.get(module, module))] = tensor
    return theirs


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_torchtitan_s_qwen3_turns_halves_and_stays_as_it_is() -> None:
    ours = weights_of(QWEN3)
    theirs = as_torchtitan(ours)
    assert equal(translate(theirs, layout_of(theirs, QWEN3), QWEN3), ours)


@pytest.mark.parametrize(("rope", "as_it_is"), [("auto", False), ("neighbours", False), ("halves", True)])
def test_torchtitan_s_llama_turns_neighbours_unless_the_option_says_halves(rope: Rope, as_it_is: bool) -> None:
    ours = weights_of(LLAMA)
    theirs = as_torchtitan(ours)
    translated = translate(theirs, layout_of(theirs, LLAMA, rope), LLAMA)
    query = "layers.0.attention.query.weight"
    rows = torch.cat([torch.arange(head * 8, head * 8 + 8).view(4, 2).T.flatten() for head in range(4)])
    assert torch.equal(translated[query], ours[query] if as_it_is else ours[query][rows])
    assert torch.equal(translated["layers.0.attention.value.weight"], ours["layers.0.attention.value.weight"])


def test_a_model_of_torchtitan_whose_pairs_are_unknown_is_refused() -> None:
    theirs = as_torchtitan(weights_of(BIASED))
    with pytest.raises(CheckpointError, match=r"pairs that RoPE turns are unknown; give --rope halves"):
        layout_of(theirs, BIASED)
    assert not layout_of(theirs, BIASED, "halves").neighbours


@pytest.mark.parametrize("config", [LLAMA, QWEN3])
def test_flat_tensors_of_torchtitan_get_their_shape_before_rows_are_reordered(config: ModelConfig) -> None:
    theirs = as_torchtitan(weights_of(config))
    flat = {name: tensor.flatten() for name, tensor in theirs.items()}
    layout = layout_of(theirs, config)
    assert layout_of(flat, config) == layout
    assert equal(translate(flat, layout, config), translate(theirs, layout, config))


def as_gpt2(weights: dict[str, Tensor], transposed: bool) -> dict[str, Tensor]:
    """GPT-2's names; matrices of blocks transposed, as transformers stores them, or not, as nanoGPT does."""
    names = {"embed": "wte", "positions": "wpe", "norm": "ln_f", "attention.output": "attn.c_proj"}
    names |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj", "attention_norm": "ln_1", "mlp_norm": "ln_2"}
    theirs: dict[str, Tensor] = {"h.0.attn.bias": torch.ones(1, 1, 16, 16)}
    for kind in ("weight", "bias"):
        parts = [weights[f"layers.0.attention.{part}.{kind}"] for part in ("query", "key", "value")]
        theirs[f"h.0.attn.c_attn.{kind}"] = torch.cat(parts)
    for name, tensor in weights.items():
        module, _, kind = name.removeprefix("layers.0.").rpartition(".")
        if module in names:
            theirs[f"{'h.0.' if name.startswith('layers') else ''}{names[module]}.{kind}"] = tensor
    if transposed:
        theirs = {name: t.T.contiguous() if ".c_" in name and t.dim() == 2 else t for name, t in theirs.items()}
    return {f"transformer.{name}": tensor for name, tensor in theirs.items()}


@pytest.mark.parametrize("transposed", [True, False])
def test_gpt2_is_read_as_transformers_stores_it_and_as_nanogpt_does(transposed: bool) -> None:
    ours = weights_of(GPT2)
    theirs = as_gpt2(ours, transposed)
    layout = layout_of(theirs, GPT2)
    assert layout == Layout("gpt2", neighbours=False, transposed=transposed)
    assert equal(translate(theirs, layout, GPT2), ours)


def test_flat_tensors_of_gpt2_get_their_shape_before_they_are_transposed() -> None:
    ours = weights_of(GPT2)
    flat = {name: tensor.flatten() for name, tensor in as_gpt2(ours, transposed=True).items()}
    assert equal(translate(flat, layout_of(flat, GPT2), GPT2), ours)
