"""An exported folder is complete or absent. tests/test_first_light.py tests what it computes."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from data_pipeline.tokenizers.tokenizer import load_tokenizer
from launch.cli import main
from train.exit_codes import STOPPED
from train.export import folder
from train.export.trained_model import Trained
from train.health.stop import SIGNALS
from train.model.config import ModelConfig
from train.model.gpt import GPT

MODEL = ModelConfig(vocab_size=320, seq_len=32, n_layers=1, n_heads=2, d_model=16, rope_theta=500.0)


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `keepstep export` on a model with initial weights, to `tmp_path / "exported"`; returns the exit code."""
    train_sentencepiece(
        ["the cat sat on the mat; the dog sat on the log\n"] * 50, tmp_path / "tokenizer", vocab_size=300
    )
    tokenizer = tmp_path / "tokenizer"
    trained = Trained(GPT(MODEL), 7, load_tokenizer(tokenizer), tokenizer)
    monkeypatch.setattr("train.export.trained_model.open_trained", lambda *_: nullcontext(trained))
    return lambda *options: main(["export", "a-run", "--out", str(tmp_path / "exported"), *options])


def contents(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()} - {"tokenizer"}


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_the_export_with_one_line_and_leaves_no_partial_folder(
    export: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)

    def signalled(*arguments: Any) -> None:
        assert (tmp_path / ".exported.partial" / "model.safetensors").exists(), "the weights are written"
        os.kill(os.getpid(), number)
        raise AssertionError("not ended by the signal")

    monkeypatch.setattr(folder, "write_tokenizer", signalled)
    assert export() == STOPPED
    assert (
        capsys.readouterr().err == f"keepstep: the export was stopped ({number.name}); nothing half-written is left\n"
    )
    assert contents(tmp_path) == set()
    assert signal.getsignal(number) is before


def test_a_second_signal_does_not_interrupt_the_clean_up(
    export: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_rmtree = folder.shutil.rmtree

    def rmtree(path: Path, ignore_errors: bool) -> None:
        if path.exists():
            os.kill(os.getpid(), signal.SIGTERM)
            removed.append(path)
        true_rmtree(path, ignore_errors)

    removed: list[Path] = []
    monkeypatch.setattr(folder, "write_tokenizer", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(folder.shutil, "rmtree", rmtree)
    assert export() == STOPPED
    assert len(removed) == 1
    assert contents(tmp_path) == set()


def test_a_failed_export_leaves_nothing_and_the_next_one_is_complete(
    export: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "write_tokenizer", full)
        assert export() == 1
    assert "no space is left for" in capsys.readouterr().err
    assert contents(tmp_path) == set()
    assert export() == 0
    assert contents(tmp_path) == {"exported"}


def test_the_check_compares_logits_without_a_data_set(
    export: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export("--check") == 0
    printed = capsys.readouterr().out
    assert "reloaded with AutoTokenizer: the ids of training on" in printed
    assert "logits differ by at most" in printed


def test_the_check_fails_if_the_exported_model_computes_something_else(
    export: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    true_write = folder.write_model

    def write_other(weights: dict[str, Any], *arguments: Any) -> None:
        true_write(weights | {"embed.weight": 10 * weights["embed.weight"]}, *arguments)

    monkeypatch.setattr(folder, "write_model", write_other)
    assert export("--check") == 1


def test_the_base_of_rope_is_where_transformers_4_and_5_look(export: Callable[..., int], tmp_path: Path) -> None:
    assert export() == 0
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0


def test_a_tokenizer_that_gives_other_ids_is_not_exported(
    export: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    true_write = folder.write_tokenizer

    def write_with_prefix(*arguments: Any) -> None:
        true_write(*arguments)
        file = arguments[3] / "tokenizer.json"
        content = json.loads(file.read_text())
        content["normalizer"]["normalizers"].insert(0, {"type": "Prepend", "prepend": "x"})
        file.write_text(json.dumps(content))

    monkeypatch.setattr(folder, "write_tokenizer", write_with_prefix)
    assert export() == 2
    assert "transformers gives other ids than training on" in capsys.readouterr().err
    assert contents(tmp_path) == set()
