"""A forward pass with a cache computes what one over the whole text computes."""

import pytest
import torch

from train.model.cache import Cache
from train.model.config import ModelConfig
from train.model.gpt import GPT

SIZES = {"vocab_size": 48, "seq_len": 16, "n_layers": 2, "n_heads": 4, "d_model": 32, "init_std": 0.3}
GPT2 = {"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True}
STYLES = [{}, {"n_kv_heads": 2, "tied_embeddings": False}, {"n_kv_heads": 1, "qk_norm": True}, GPT2]


def model_of(style: dict[str, object]) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig.model_validate(SIZES | style)).eval()


def logits(model: GPT, tokens_BT: torch.Tensor, first: int = 0, cache: Cache | None = None) -> torch.Tensor:
    positions_BT = (first + torch.arange(tokens_BT.shape[1])).expand_as(tokens_BT)
    with torch.inference_mode():
        found = model(tokens_BT, positions_BT, torch.zeros_like(tokens_BT), cache=cache)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("style", STYLES, ids=["llama", "grouped", "multi-query", "gpt2"])
def test_logits_with_a_cache_equal_those_without(style: dict[str, object]) -> None:
    model, tokens_BT = model_of(style), torch.randint(48, (2, 16), generator=torch.Generator().manual_seed(1))
    cache = Cache(model.config, 2, 16, model.embed.weight)
    ends = [5, 6, 12, 13, 14, 16]
    parts = [logits(model, tokens_BT[:, start:end], start, cache) for start, end in zip([0, *ends], ends, strict=False)]
    assert (torch.cat(parts, dim=1) - logits(model, tokens_BT)).abs().max() < 1e-5


def test_padding_of_a_short_row_is_never_seen() -> None:
    model, tokens_BT = model_of({"n_kv_heads": 2}), torch.arange(10).view(2, 5)
    cache = Cache(model.config, 2, 8, model.embed.weight)
    logits(model, tokens_BT, 0, cache)  # of row 1, only 3 tokens are text
    new_B1, positions_B1 = torch.tensor([[40], [41]]), torch.tensor([[5], [3]])
    with torch.inference_mode():
        found = model(new_B1, positions_B1, torch.zeros_like(new_B1), cache=cache)
    alone = logits(model, torch.tensor([[5, 6, 7, 41]]))
    assert isinstance(found, torch.Tensor)
    assert (found[1, 0] - alone[0, -1]).abs().max() < 1e-5


def test_the_cache_takes_the_memory_that_its_formula_says() -> None:
    model = model_of({"n_kv_heads": 2})
    layers, rows, positions, kv_heads, head_width, bytes_of_a_number = 2, 3, 16, 2, 8, 4
    cache = Cache(model.config, rows, positions, model.embed.weight)
    assert cache.bytes == 2 * layers * rows * positions * kv_heads * head_width * bytes_of_a_number
