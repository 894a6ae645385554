import argparse
import json
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import TRAIN, VALIDATION
from launch.cli import main
from launch.data.reading import add_reading, read_options, unescape


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_reading(parser)
    return parser.parse_args(["in", *arguments])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(r"\r\n\r\n", "\r\n\r\n"), (r"\t|\x1e\u2029", "\t|\x1e\u2029"), (r"a\\n", r"a\n"), (r"\d", r"\d"), ("---", "---")],
)
def test_a_separator_may_have_escapes(text: str, wanted: str) -> None:
    assert unescape(text) == wanted
    assert read_options(options(f"--separator={text}")).separator == wanted


def test_a_text_key_is_for_all_files_or_for_some() -> None:
    read = read_options(options("--text-key", "web/=body", "--text-key", "content"))
    assert (read.text_key, read.text_keys) == ("content", (("web/", "body"),))
    assert read_options(options()).text_key == "text"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text-key", "a", "--text-key", "b"], r"--text-key is given 2 times \(a, b\); give one for all files"),
        (["--separator", ""], r"--separator must not be empty"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_options(options(*arguments))


def test_text_keys_and_validation_files_are_read_as_the_command_says(folder: Path, tmp_path: Path) -> None:
    for name, key in (("web", "body"), ("code", "text"), ("check", "text")):
        rows = (json.dumps({key: f"{name} {number}"}) + "\n" for number in range(9))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    inputs = [str(tmp_path / "web.jsonl"), str(tmp_path / "code.jsonl"), "--validation", str(tmp_path / "check.jsonl")]
    fixed = ["--out", str(tmp_path / "set"), "--tokenizer", str(folder / "tokenizer"), "--workers", "1"]
    keys = ["--text-key", "*web*=body"]
    assert main(["data", "build", *inputs, *keys, *fixed, "--seq-len", "32"]) == 0
    splits = DataSet(str(tmp_path / "set")).manifest.splits
    assert (splits[TRAIN].documents, splits[VALIDATION].documents) == (18, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text-key", "none/*=body"], "--text-key none/*=body: no input file matches none/*"),
        (["--validation", "IN", "--validation-share", "0.1"], "--validation-share (0.1) and --validation exclude"),
        (["--validation-share", "1.5"], "--validation-share (1.5) must be a number from 0 to 1"),
        (["--beginning-of-document", "the"], "has no control token the"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    inputs = str(folder / "in.jsonl")
    given = [inputs if argument == "IN" else argument for argument in arguments]
    fixed = ["--out", str(tmp_path / "set"), "--tokenizer", str(folder / "tokenizer"), "--workers", "1"]
    assert main(["data", "build", inputs, *fixed, *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("keepstep: ")
    assert message in line
    assert not list(tmp_path.iterdir())


def test_a_byte_level_bpe_can_be_trained_and_used(folder: Path, tmp_path: Path) -> None:
    inputs, trained = str(folder / "in.jsonl"), str(tmp_path / "tokenizer")
    assert main(["data", "tokenizer", inputs, "--out", trained, "--kind", "byte-bpe", "--vocab-size", "270"]) == 0
    fixed = ["--out", str(tmp_path / "set"), "--tokenizer", trained, "--workers", "1"]
    assert main(["data", "build", inputs, *fixed]) == 0
    assert DataSet(str(tmp_path / "set")).manifest.vocab_size == 270
