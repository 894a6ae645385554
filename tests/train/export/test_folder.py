"""A folder is there whole or not at all. What it computes is tested in tests/test_first_light.py."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from data_pipeline.tokenizers.tokenizer import load_tokenizer
from launch.cli import main
from train.config import Recipe
from train.exit_codes import STOPPED
from train.export import folder
from train.export.trained_model import Trained
from train.health.stop import SIGNALS
from train.model.gpt import GPT

RECIPE = {
    "name": "small",
    "model": {"vocab_size": 320, "seq_len": 32, "n_layers": 1, "n_heads": 2, "d_model": 16},
    "data": {"sources": [{"path": "unused"}]},
    "optim": {"lr": 1e-3, "warmup_steps": 0},
    "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
}


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """`keepstep export` of a model with its initial weights to `tmp_path / "exported"`; the exit code."""
    train_sentencepiece(
        ["the cat sat on the mat; the dog sat on the log\n"] * 50, tmp_path / "tokenizer", vocab_size=300
    )
    recipe = Recipe.model_validate(RECIPE)
    tokenizer = tmp_path / "tokenizer"
    trained = Trained(recipe, GPT(recipe.model), 7, load_tokenizer(tokenizer), tokenizer)
    monkeypatch.setattr("train.export.trained_model.load_trained", lambda _: trained)
    return lambda: main(["export", "a-run", "--out", str(tmp_path / "exported")])


def left_in(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()} - {"tokenizer"}


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_it_with_one_line_and_nothing_half_written(
    export: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)

    def asked(*arguments: Any) -> None:
        assert (tmp_path / ".exported.partial" / "model.safetensors").exists(), "the weights are written"
        os.kill(os.getpid(), number)
        raise AssertionError("not ended by the signal")

    monkeypatch.setattr(folder, "write_tokenizer", asked)
    assert export() == STOPPED
    assert (
        capsys.readouterr().err == f"keepstep: the export was stopped ({number.name}); nothing half-written is left\n"
    )
    assert left_in(tmp_path) == set()
    assert signal.getsignal(number) is before


def test_a_second_signal_leaves_it_time_to_clear_up(
    export: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_rmtree = folder.shutil.rmtree

    def rmtree(path: Path, ignore_errors: bool) -> None:
        if path.exists():
            os.kill(os.getpid(), signal.SIGTERM)
            again.append(path)
        true_rmtree(path, ignore_errors)

    again: list[Path] = []
    monkeypatch.setattr(folder, "write_tokenizer", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(folder.shutil, "rmtree", rmtree)
    assert export() == STOPPED
    assert len(again) == 1
    assert left_in(tmp_path) == set()


def test_a_failure_leaves_nothing_and_the_next_export_is_whole(
    export: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "write_tokenizer", full)
        with pytest.raises(OSError, match="No space left"):
            export()
    assert left_in(tmp_path) == set()
    assert export() == 0
    assert left_in(tmp_path) == {"exported"}
