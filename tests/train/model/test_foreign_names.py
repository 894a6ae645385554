"""The tables of foreign names cover every module of a model in the family's style."""

import torch

from train.model.config import ModelConfig
from train.model.foreign_names import GPT2, LLAMA
from train.model.gpt import GPT

SIZES = {"vocab_size": 64, "seq_len": 16, "n_layers": 1, "n_heads": 2, "d_model": 16}


def modules_with_parameters(**settings: object) -> set[str]:
    with torch.device("meta"):
        names = [name for name, _ in GPT(ModelConfig.model_validate({**SIZES, **settings})).named_parameters()]
    return {name.rpartition(".")[0].removeprefix("layers.0.") for name in names}


def test_llamas_table_is_complete() -> None:
    assert modules_with_parameters(qk_norm=True, tied_embeddings=False) == LLAMA.keys()


def test_gpt2s_table_lacks_only_the_projections_that_it_stores_as_one() -> None:
    found = modules_with_parameters(
        positions="learned", norm="layernorm", activation="gelu", bias=True, tied_embeddings=False
    )
    assert found - GPT2.keys() == {"attention.query", "attention.key", "attention.value"}
    assert found >= GPT2.keys()
