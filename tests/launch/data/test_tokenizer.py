import json
from pathlib import Path

import pytest

from data_pipeline.tokenizers.tokenizer import load_tokenizer
from launch.cli import main


def test_a_tokenizer_is_trained_from_text(folder: Path) -> None:
    assert load_tokenizer(folder / "tokenizer").vocab_size == 300


def test_the_size_of_the_tokenizer_and_its_text_are_printed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["data", "tokenizer", str(folder / "in.jsonl"), "--out", str(tmp_path), "--vocab-size", "300"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training a SentencePiece tokenizer with 300 tokens ..."
    assert lines[1].startswith(f"{tmp_path}/tokenizer.model: 300 tokens, trained on ")
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["file"], shown["vocab_size"]) == (f"{tmp_path}/tokenizer.model", 300)
    assert shown["text_bytes"] > 0


def test_only_the_sample_is_trained_on(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "large.txt").write_text("the cat sat on the mat\n" * 100_000)
    arguments = ["--out", str(tmp_path / "tokenizer"), "--vocab-size", "275", "--separator", r"\n"]
    assert main(["data", "tokenizer", str(tmp_path / "large.txt"), *arguments, "--sample-mib", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text_bytes"] == pytest.approx(1 << 20, rel=0.01)
