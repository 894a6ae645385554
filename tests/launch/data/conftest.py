"""A tokenizer, a data set and a recipe for the tests of `keepstep data`."""

import json
from pathlib import Path

import pytest

from launch.cli import main

TEXTS = [f"{number} the cat sat on the mat and saw {number * 7} dogs\n" * (1 + number % 5) for number in range(120)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `in.jsonl`, a `tokenizer` and a data set `set`, made by the commands. Read-only."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    inputs = str(folder / "in.jsonl")
    assert main(["data", "tokenizer", inputs, "--out", str(folder / "tokenizer"), "--vocab-size", "300"]) == 0
    arguments = ["--out", str(folder / "set"), "--tokenizer", str(folder / "tokenizer"), "--seq-len", "32"]
    assert main(["data", "build", inputs, *arguments, "--workers", "1"]) == 0
    return folder


@pytest.fixture(scope="session")
def recipe(folder: Path) -> Path:
    """A recipe that trains on the data set `set`."""
    model = "{vocab_size: 320, seq_len: 16, n_layers: 1, n_heads: 1, d_model: 8}"
    file = folder / "recipe.yaml"
    file.write_text(
        f"name: small\nmodel: {model}\ndata: {{sources: [{{path: {folder / 'set'}}}]}}\noptim: {{lr: 1e-3, "
        "warmup_steps: 1}\ntrain: {steps: 90, global_batch_size: 8, micro_batch_size: 4}\n"
    )
    return file
