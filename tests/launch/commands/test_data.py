import json
import re
from itertools import islice
from pathlib import Path

import pytest

from data_pipeline.build.prepare import Progress
from data_pipeline.config import DataConfig
from data_pipeline.stream.stream import open_stream
from data_pipeline.tokenizers.tokenizer import load_tokenizer
from launch.cli import main
from launch.commands.data import progress_line
from launch.data import trace as data_trace

TEXTS = [f"{number} the cat sat on the mat and saw {number * 7} dogs\n" * (1 + number % 5) for number in range(120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a data set made by the commands."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    inputs = str(folder / "in.jsonl")
    assert main(["data", "tokenizer", inputs, "--out", str(folder / "tokenizer"), "--vocab-size", "300"]) == 0
    arguments = ["--out", str(folder / "set"), "--tokenizer", str(folder / "tokenizer"), "--seq-len", "32"]
    assert main(["data", "build", inputs, *arguments, "--workers", "1"]) == 0
    return folder


def test_a_tokenizer_and_a_data_set_are_made_by_two_commands(folder: Path) -> None:
    assert load_tokenizer(folder / "tokenizer").vocab_size == 300
    config = DataConfig.model_validate({"sources": [{"path": str(folder / "set")}]})
    with open_stream(config, seq_len=32) as stream:
        steps = stream.steps(first_step=0, global_batch_size=4, micro_batch_size=2, rank=0, world_size=1)
        assert [batch.tokens_BT.shape for step in islice(steps, 2) for batch in step] == [(2, 32)] * 4


def test_show_tells_what_a_data_set_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", str(folder / "set")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"rows of +32 tokens, uint16, in blocks of 4096 rows", text)
    assert re.search(r"120  documents read", text)
    assert re.search(r"train +\d+ rows, \d+ documents \(\d+ in several rows\), [\d,]+ tokens, .* % padding", text)
    assert main(["data", "show", str(folder / "set"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fingerprint"] in text
    assert sum(shown["lengths"].values()) == 120


def test_repack_cuts_rows_anew(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(folder / "repacked")
    assert main(["data", "repack", str(folder / "set"), "--out", out, "--seq-len", "48", "--workers", "1"]) == 0
    assert re.search(r"rows of +48 tokens", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nothing"], "no data set in nothing (no manifest.json)"),
        (["build", "nothing", "--out", "x", "--tokenizer", "TOKENIZER"], "no file matches nothing"),
        (["build", "INPUT", "--out", "x", "--tokenizer", "./none"], "no tokenizer in none"),
        (["build", "INPUT", "--out", "x", "--tokenizer", "TOKENIZER", "--text-key", "body"], "has the key 'body'"),
        (["build", "INPUT", "--out", "x", "--tokenizer", "TOKENIZER", "--share", "3/3"], "--share (3/3) must be I/N"),
        (["build", "INPUT", "--out", "x", "--tokenizer", "TOKENIZER", "--filter", "nowhere:f"], "--filter nowhere:f"),
        (["tokenizer", "INPUT", "--out", "x", "--vocab-size", "99999"], "99999 is too large for this text"),
        (["audit", "nothing"], "nothing"),
        (["trace", "RECIPE", "--step", "0"], "--step (0) must be at least 1"),
        (["trace", "RECIPE", "--data-step", "-1"], "--data-step (-1) must be at least 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    folder: Path,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"TOKENIZER": folder / "tokenizer", "INPUT": folder / "in.jsonl", "RECIPE": recipe}
    assert main(["data", *(str(places.get(argument, argument)) for argument in arguments)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("keepstep: ")
    assert message in errors[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    model = "{vocab_size: 320, seq_len: 16, n_layers: 1, n_heads: 1, d_model: 8}"
    file = folder / "recipe.yaml"
    file.write_text(
        f"name: small\nmodel: {model}\ndata: {{sources: [{{path: {folder / 'set'}}}]}}\noptim: {{lr: 1e-3, "
        "warmup_steps: 1}\ntrain: {steps: 90, global_batch_size: 8, micro_batch_size: 4}\n"
    )
    return file


def test_a_recipe_that_has_not_run_is_audited(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "audit", str(recipe), "--ranks", "1,2,5"]) == 0
    text = capsys.readouterr().out
    assert "720 samples, the same on 1, 2, 5 ranks; no row twice in an epoch" in text
    assert re.search(r"epoch 0: (\d+) of \1 rows, complete, every row once", text)
    assert "no counters to compare with" in text


def test_the_documents_of_a_step_are_printed(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "trace", str(recipe), "--step", "3", "--sample", "5"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"sample 21: .*set, epoch 0, row \d+", text)
    assert re.search(r"in.jsonl, document \d+, from token \d+, \d+ tokens", text)
    assert " the cat" in text or "dogs" in text


def test_a_step_and_its_batch_are_traced_alike(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "trace", str(recipe), "--step", "3"]) == 0
    by_step = capsys.readouterr().out
    assert main(["data", "trace", str(recipe), "--data-step", "2"]) == 0
    assert capsys.readouterr().out == by_step


def test_a_run_that_passed_over_a_batch_is_traced_at_the_batch_that_it_used(tmp_path: Path) -> None:
    rows = [{"step": 1, "data_step": 1}, {"step": 2, "data_step": 3}, {"step": 3, "data_step": 4}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [data_trace._data_step(tmp_path, step) for step in (1, 2, 3, 9)] == [0, 2, 3, 8]


def test_the_counters_of_a_run_are_audited(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The states that a checkpoint would hold, put in the place of one."""
    loaded, _ = data_trace._open(recipe)
    states = []
    for rank in range(2):
        with open_stream(loaded.data, seq_len=16) as stream:
            steps = stream.steps(first_step=0, global_batch_size=8, micro_batch_size=4, rank=rank, world_size=2)
            list(islice(steps, 30))
            states.append(stream.state(30))
    monkeypatch.setattr(data_trace, "_open", lambda path: (loaded, states))
    assert main(["data", "audit", str(recipe)]) == 0
    assert "240 samples" in (text := capsys.readouterr().out)
    assert "the counters of the newest checkpoint agree with the plan" in text
    states[1]["counters"][0][2] += 1
    assert main(["data", "audit", str(recipe)]) == 2
    assert "the run's counters differ from its plan" in capsys.readouterr().err


def test_the_progress_line_has_rates_and_time_left() -> None:
    line = progress_line(Progress("tokenize", 3, 10, 50_000_000, 1000, 12_000_000, 10.0, 23.4))
    assert line == "tokenize 3/10, 100 documents/s, 5.0 MB/s, 1,200,000 tokens/s, 23 s left"
