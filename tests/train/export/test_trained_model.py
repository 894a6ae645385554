"""A checkpoint is enough to use its model: no data set, no recipe file, no particular place."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from launch.cli import main
from train.checkpoint.format.attachments import plain_files
from train.checkpoint.importing import keepstep
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.config import CheckpointConfig, Recipe
from train.errors import CheckpointError
from train.export.trained_model import open_trained
from train.model.gpt import GPT
from train.start import identity_of

RECIPE: dict[str, Any] = {
    "name": "small",
    "model": {"vocab_size": 320, "seq_len": 32, "n_layers": 1, "n_heads": 2, "d_model": 16, "rope_theta": 500.0},
    "data": {"sources": [{"path": "a-data-set-that-is-gone"}]},
    "optim": {"lr": 1e-3, "warmup_steps": 0},
    "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
}


def save(run: Path, **options: Any) -> Path:
    """Save a checkpoint of a small model in a run folder; returns the checkpoint."""
    recipe = Recipe.model_validate(RECIPE)
    manager = CheckpointManager(
        run / "checkpoints", CheckpointConfig(background=False), identity_of(recipe), lambda *_, **__: None, **options
    )
    torch.manual_seed(1)
    manager.save(SavedProgress(3, 96), {f"model.{name}": p for name, p in GPT(recipe.model).named_parameters()}, {})
    manager.close()
    return run / "checkpoints" / "step-00000003"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    train_sentencepiece(["the cat sat on the mat; the dog sat\n"] * 50, root / "tokenizer", vocab_size=290)
    recipe = Recipe.model_validate(RECIPE).model_dump(mode="json")
    save(root / "run", recipe=recipe, attachments=plain_files(root / "tokenizer"))
    return root / "run"


@pytest.mark.parametrize("place", ["checkpoint", "checkpoints", "run"])
def test_a_moved_copy_generates_and_exports_without_data_or_recipe(
    place: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {"run": run, "checkpoints": run / "checkpoints", "checkpoint": run / "checkpoints" / "step-00000003"}
    copy = tmp_path / "elsewhere" / place
    shutil.copytree(sources[place], copy)
    monkeypatch.chdir(tmp_path)
    assert main(["generate", str(copy), "--prompt", "the cat", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("the cat")
    assert main(["export", str(copy), "--out", "out", "--check"]) == 0
    assert json.loads(Path("out/config.json").read_text())["rope_theta"] == 500.0


def test_the_model_is_that_of_the_checkpoint_whatever_a_later_start_wrote(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    other = json.loads(json.dumps(RECIPE))
    other["model"] |= {"n_heads": 4, "rope_theta": 9.0, "norm_eps": 0.1}
    (tmp_path / "run" / "recipe.yaml").write_text(json.dumps(other))
    with open_trained(tmp_path / "run") as trained:
        config = trained.model.config
    assert (config.n_heads, config.rope_theta, config.norm_eps) == (2, 500.0, 1e-5)


def test_an_earlier_checkpoint_states_its_model_but_needs_the_data_set_for_the_tokenizer(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run")
    (tmp_path / "run" / "recipe.yaml").write_text(json.dumps(RECIPE))
    with pytest.raises(CheckpointError, match=r"carries no tokenizer.*no data set in a-data-set-that-is-gone"):
        open_trained(checkpoint).__enter__()


def test_a_tokenizer_larger_than_the_model_is_refused(run: Path, tmp_path: Path) -> None:
    recipe = Recipe.model_validate(RECIPE).model_dump(mode="json")
    train_sentencepiece(["the quick brown fox jumps\n"] * 50 + ["abcdefg hijklmn"] * 9, tmp_path / "t", vocab_size=330)
    checkpoint = save(tmp_path / "run", recipe=recipe, attachments=plain_files(tmp_path / "t"))
    with pytest.raises(CheckpointError, match="has 330 tokens, more than the model's vocabulary"):
        open_trained(checkpoint).__enter__()


@pytest.mark.parametrize("change", ["cut", "edit", "remove"])
def test_a_damaged_tokenizer_is_found(change: str, run: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000003"
    shutil.copytree(run / "checkpoints" / checkpoint.name, checkpoint)
    file = checkpoint / "tokenizer" / "tokenizer.model"
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-1], "edit": b"\1" + content[1:]}.get(change, b""))
    if change == "remove":
        file.unlink()
    assert main(["checkpoint", "verify", str(checkpoint)]) == 2
    with pytest.raises(CheckpointError, match=r"tokenizer/tokenizer.model: (has|the content|cannot be read)"):
        open_trained(checkpoint).__enter__()


def test_another_file_beside_the_tokenizer_changes_nothing(run: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000003"
    shutil.copytree(run / "checkpoints" / checkpoint.name, checkpoint)
    (checkpoint / "tokenizer" / "keepstep.json").write_text('{"end_of_document": "<s>"}')
    with open_trained(checkpoint) as trained:
        assert trained.tokenizer.end_of_document == 2


def test_the_weights_alone_can_be_imported(run: Path) -> None:
    source = keepstep.read(run)
    assert source.step == 0
    assert not source.optimizer
    model = GPT(Recipe.model_validate(RECIPE).model)
    assert source.weights.keys() == {name for name, _ in model.named_parameters()}
    assert source.stated is not None
    assert source.stated.settings["rope_theta"] == 500.0
