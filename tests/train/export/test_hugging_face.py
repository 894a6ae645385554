"""An exported folder computes the same function as the trained model."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from parallel.engines.initial import fill_model
from train.errors import ConfigError
from train.export.hugging_face import family_of, write_model
from train.model.config import ModelConfig
from train.model.gpt import GPT, initial_value
from train.model.mlp import FeedForward

SIZES: dict[str, Any] = {"vocab_size": 128, "seq_len": 32, "n_layers": 2, "n_heads": 4, "d_model": 32}
LLAMA = ModelConfig(**SIZES, n_kv_heads=2)
LLAMA_WITH_BIASES = ModelConfig(**SIZES, bias=True, tied_embeddings=False)
QWEN3 = ModelConfig(**SIZES, qk_norm=True)
GPT2 = ModelConfig(**SIZES, positions="learned", norm="layernorm", activation="gelu", bias=True)
GPT2_WITHOUT_BIASES = GPT2.model_copy(update={"bias": False, "tied_embeddings": False})


def random_model(config: ModelConfig) -> GPT:
    """A model with larger initial weights and changed biases and gains, so that a swapped tensor changes the logits."""
    model = GPT(config)
    generator = torch.Generator().manual_seed(0)
    fill_model(model, partial(initial_value, config=config, seed=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5).add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("config", [LLAMA, LLAMA_WITH_BIASES, QWEN3, GPT2, GPT2_WITHOUT_BIASES])
def test_the_exported_model_gives_the_same_logits_without_the_padded_rows(config: ModelConfig, tmp_path: Path) -> None:
    model = random_model(config)
    write_model(dict(model.named_parameters()), config, vocab_size=100, end_of_document=2, folder=tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens_BT = torch.randint(0, 100, (2, 32), generator=torch.Generator().manual_seed(3))
    positions_BT = torch.arange(32).expand(2, -1)
    ours_BTV = model(tokens_BT, positions_BT, torch.zeros_like(tokens_BT))
    theirs_BTV = theirs(tokens_BT).logits
    assert theirs_BTV.shape[-1] == 100
    torch.testing.assert_close(ours_BTV[..., :100], theirs_BTV, atol=1e-4, rtol=1e-4)
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 2


def test_a_model_that_no_architecture_fits_is_refused() -> None:
    config = ModelConfig(**SIZES, norm="layernorm")
    with pytest.raises(ConfigError, match="no Hugging Face architecture has positions=rope, norm=layernorm"):
        write_model({}, config, vocab_size=100, end_of_document=2, folder=Path("unused"))


@pytest.mark.parametrize("config", [LLAMA, QWEN3, GPT2])
def test_a_block_that_states_no_names_is_refused(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(FeedForward):
        """A new block in the place of the present one. No architecture has it."""

    monkeypatch.setattr("train.export.hugging_face.feed_forward_class", lambda _: Other)
    with pytest.raises(ConfigError, match="no Hugging Face architecture has"):
        family_of(config)
