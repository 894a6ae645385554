"""A tiny data set, and a recipe that trains on it in a second."""

import json
from pathlib import Path

import pytest

from launch.cli import main


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose runs go to `runs` beside it."""
    folder = tmp_path_factory.mktemp("sweeps")
    texts = [f"{number} the cat sat on the mat and saw {number * 7} dogs\n" * (1 + number % 5) for number in range(200)]
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    inputs = str(folder / "in.jsonl")
    assert main(["data", "tokenizer", inputs, "--out", str(folder / "tokenizer"), "--vocab-size", "300"]) == 0
    built = ["--out", str(folder / "set"), "--tokenizer", str(folder / "tokenizer"), "--seq-len", "16"]
    assert main(["data", "build", inputs, *built, "--workers", "1", "--validation-share", "0.2"]) == 0
    model = "{vocab_size: 320, seq_len: 16, n_layers: 1, n_heads: 2, d_model: 16}"
    file = folder / "small.yaml"
    file.write_text(
        f"name: small\nruns_dir: {folder / 'runs'}\nmodel: {model}\ndata: {{sources: [{{path: {folder / 'set'}}}]}}\n"
        "optim: {lr: 1e-2, warmup_steps: 4}\n"
        "train: {steps: 8, global_batch_size: 8, micro_batch_size: 8, eval_sequences: 16}\n"
        "parallel: {engine: single, device: cpu, precision: fp32}\ncheckpoint: {background: false}\n"
    )
    return file
