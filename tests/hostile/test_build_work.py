"""An interrupted build whose work folder was damaged ends with the same data set, or says what is damaged."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cli import main
from tests.data_pipeline.sets import documents, tree, write_jsonl

OPTIONS = ("--seq-len", "32", "--workers", "1", "--validation-share", "0.1")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def grow(path: Path) -> None:
    os.truncate(path, 1 << 40)


@pytest.fixture
def interrupted(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The work folder of a build that has tokenized everything; `whole` is the same build without interruption."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", documents(60))
    assert build(tokenizer, "whole") == 0
    assert build(tokenizer, "set", "--share", "0/1") == 0
    return tmp_path / "set.work"


def build(tokenizer: Path, out: str, *options: str) -> int:
    return main(["data", "build", "in.jsonl", "--out", out, "--tokenizer", str(tokenizer), *OPTIONS, *options])


@pytest.mark.parametrize("damage", [flip, cut, fifo, grow, Path.unlink], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["task-000000.tokens", "task-000000.documents", "task-000000.json"])
def test_a_continued_build_does_damaged_work_again(
    interrupted: Path, tokenizer: Path, name: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(interrupted / name)
    assert build(tokenizer, "set") == 0
    assert tree(Path("set")) == tree(Path("whole"))


def test_a_result_of_other_work_is_not_used(interrupted: Path, tokenizer: Path) -> None:
    done = interrupted / "task-000000.json"
    content = json.loads(done.read_text())
    content["result"]["tokens"] += 1
    done.write_text(json.dumps(content))
    assert build(tokenizer, "set") == 0
    assert tree(Path("set")) == tree(Path("whole"))


@pytest.mark.parametrize("content", ["[]", "{", '{"hash": 1}', "[" * 100_000])
def test_a_damaged_plan_is_one_line(
    interrupted: Path, tokenizer: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (interrupted / "plan.json").write_text(content)
    assert build(tokenizer, "set") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "plan.json is damaged" in lines[0]
