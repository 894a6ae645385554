from pathlib import Path

import pytest

from launch.cli import main


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
        (["tokenizer", "nothing", "--out", "x"], "no file matches nothing"),
        (["audit", "nothing"], "nothing"),
        (["trace", "RECIPE", "--step", "0"], "--step (0) must be at least 1"),
        (["trace", "RECIPE", "--data-step", "-1"], "--data-step (-1) must be at least 0"),
        (["trace", "RECIPE", "--step", "1", "--sample", "8"], "--sample must be 0 to 7"),
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
    values = {"TOKENIZER": folder / "tokenizer", "INPUT": folder / "in.jsonl", "RECIPE": recipe}
    assert main(["data", *(str(values.get(argument, argument)) for argument in arguments)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("keepstep: ")
    assert message in errors[-1]
    assert list(tmp_path.iterdir()) == []
