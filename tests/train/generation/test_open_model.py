"""A folder of Hugging Face is opened as its tokenizer and its config say."""

import json
from pathlib import Path

import pytest
import torch

from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from data_pipeline.tokenizers.tokenizer import load_tokenizer
from train.errors import CheckpointError
from train.export.folder import export
from train.export.tokenizer import write_tokenizer
from train.export.trained_model import Trained
from train.generation.complete import Request, complete
from train.generation.open_model import open_model
from train.generation.sampling import Sampling
from train.model.config import ModelConfig
from train.model.gpt import GPT

MODEL = ModelConfig(vocab_size=320, seq_len=32, n_layers=1, n_heads=2, d_model=16, rope_theta=500.0)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    train_sentencepiece(["the cat sat on the mat; the dog sat\n"] * 50, tmp_path / "tokenizer", vocab_size=290)
    torch.manual_seed(1)
    export(Trained(GPT(MODEL), 7, load_tokenizer(tmp_path / "tokenizer"), tmp_path / "tokenizer"), tmp_path / "out")
    return tmp_path / "out"


def test_the_model_and_the_length_of_its_context_are_those_of_the_folder(exported: Path) -> None:
    opened = open_model(exported)
    assert opened.step is None
    assert (opened.model.config.rope_theta, opened.model.config.seq_len) == (500.0, 32)
    assert opened.tokenizer.beginning_of_document is None
    assert not opened.model.training


def test_the_token_that_begins_each_text_begins_the_prompt(exported: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    begin = 1
    write_tokenizer(tmp_path / "tokenizer", tokenizer.end_of_document, 32, exported, begin)
    opened = open_model(exported)
    assert opened.tokenizer.beginning_of_document == begin
    request = Request(["the cat"], 1, Sampling(temperature=0.0), [1])
    assert complete(opened, request).prompt_tokens == [1 + len(tokenizer.encode("the cat"))]


def test_a_tokenizer_larger_than_the_model_is_refused(exported: Path, tmp_path: Path) -> None:
    train_sentencepiece(
        ["the quick brown fox jumps\n"] * 50 + ["abcdefg hijklmn"] * 9, tmp_path / "other", vocab_size=330
    )
    write_tokenizer(tmp_path / "other", load_tokenizer(tmp_path / "other").end_of_document, 32, exported)
    with pytest.raises(CheckpointError, match="has 330 tokens, more than the model's vocabulary"):
        open_model(exported)


def test_more_layers_than_tensors_are_refused_before_they_are_built(exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9999}))
    with pytest.raises(CheckpointError, match="states 9999 layers, more than it has tensors"):
        open_model(exported)
