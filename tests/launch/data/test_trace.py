import json
import re
from pathlib import Path

import pytest

from launch.cli import main
from launch.data.trace import data_step
from launch.report.documents import documents_of


def test_the_documents_of_a_step_are_printed(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "trace", str(recipe), "--step", "3", "--sample", "5"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"sample 21: .*set, epoch 0, row \d+", text)
    assert re.search(r"in.jsonl, document \d+, from token \d+, \d+ tokens", text)
    assert " the cat" in text or "dogs" in text


def test_long_texts_are_shortened(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "trace", str(recipe), "--step", "3", "--sample", "5", "--characters", "2"]) == 0
    assert re.search(r" \| ..? \.\.\. \d+ more characters\n", capsys.readouterr().out)


def test_the_trace_is_printed_as_json(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "trace", str(recipe), "--step", "3", "--sample", "5", "--json"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert (sample["sample"], sample["epoch"]) == (21, 0)
    assert {"file", "number", "first_token", "tokens", "text"} == set(sample["documents"][0])


def test_a_step_and_its_global_batch_give_the_same_trace(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "trace", str(recipe), "--step", "3"]) == 0
    by_step = capsys.readouterr().out
    assert main(["data", "trace", str(recipe), "--data-step", "2"]) == 0
    assert capsys.readouterr().out == by_step


def test_after_a_skipped_batch_a_step_is_traced_at_the_batch_that_it_used(tmp_path: Path) -> None:
    rows = [{"step": 1, "data_step": 1}, {"step": 2, "data_step": 3}, {"step": 3, "data_step": 4}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [data_step(tmp_path, step) for step in (1, 2, 3, 9)] == [0, 2, 3, 8]


def test_a_report_shows_the_documents_of_bad_steps(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [{"kind": "spike", "data_step": 2, "samples": 8}, {"kind": "spike", "step": 9}]
    rows = documents_of(recipe, bad)
    assert main(["data", "trace", str(recipe), "--data-step", "2", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    traced = [(str(one["sample"]), each["file"], str(each["number"])) for one in samples for each in one["documents"]]
    assert [tuple(row[1:4]) for row in rows] == traced[: len(rows)]
    assert {row[0] for row in rows} == {"2"}


def test_a_report_without_the_data_set_shows_no_documents(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe.read_text().replace("/set", "/gone"))
    assert documents_of(tmp_path / "recipe.yaml", [{"data_step": 2, "samples": 8}]) == []
