"""Small runs of several styles, with a model that does not repeat one token, and their exported folders."""

from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from launch.cli import main
from train.checkpoint.format.attachments import plain_files
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.config import CheckpointConfig, Recipe
from train.model.config import ModelConfig
from train.model.gpt import GPT
from train.start import identity_of

RECIPE: dict[str, Any] = {
    "name": "small",
    "data": {"sources": [{"path": "a-data-set-that-is-gone"}]},
    "optim": {"lr": 1e-3, "warmup_steps": 0},
    "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
}
SIZES = {"vocab_size": 320, "seq_len": 48, "n_layers": 2, "n_heads": 4, "d_model": 32}
STYLES: dict[str, dict[str, Any]] = {
    "grouped": {"n_kv_heads": 2, "tied_embeddings": False},
    "tied-qk-norm": {"qk_norm": True},
    "gpt2": {"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True},
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each style, and its exported folder NAME-exported."""
    root = tmp_path_factory.mktemp("runs")
    train_sentencepiece(["the cat sat on the mat; the dog sat\n"] * 50, root / "tokenizer", vocab_size=290)
    for name, style in STYLES.items():
        recipe = Recipe.model_validate(RECIPE | {"model": SIZES | style})
        manager = CheckpointManager(
            root / name / "checkpoints",
            CheckpointConfig(background=False),
            identity_of(recipe),
            lambda *_, **__: None,
            recipe=recipe.model_dump(mode="json"),
            attachments=plain_files(root / "tokenizer"),
        )
        manager.save(SavedProgress(3, 96), weights_of(recipe.model), {})
        manager.close()
        assert main(["export", str(root / name), "--out", str(root / f"{name}-exported")]) == 0
    return root


def weights_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random weights of a model that does not repeat one token."""
    torch.manual_seed(3)
    weights = {name: parameter.detach() for name, parameter in GPT(config).named_parameters()}
    for name, weight in weights.items():
        if weight.dim() == 2:
            weight.normal_(std=0.5 if name.startswith("layers.") else 0.1)
    return {f"model.{name}": weight for name, weight in weights.items()}
