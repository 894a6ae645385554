import json
import re
from pathlib import Path

import pytest

from launch.cli import main
from launch.data.report import histogram


def test_show_prints_facts_splits_counts_and_lengths(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", str(folder / "set")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"row +32 tokens, uint16\n", text)
    assert re.search(r"block +4,096 rows, compression none\n", text)
    assert re.search(r"tokenizer +tokenizer.model: 300 tokens, end of document 2\n", text)
    assert re.search(r"documents read +120 *\n", text)
    assert re.search(r"split +rows +documents +cut +tokens +padding +shards +size *\n", text)
    assert re.search(r"train +\d+ +\d+ +\d+ +[\d,]+ +\d+\.\d+% +1 +[\d.]+ kB *\n", text)
    assert re.search(r"validation +\d+ ", text)
    assert "\x1b" not in text
    assert main(["data", "show", str(folder / "set"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fingerprint"] in text
    assert sum(shown["lengths"].values()) == 120


def test_the_histogram_has_a_bar_for_every_length() -> None:
    assert histogram({"8": 1, "1024": 4000}) == [["8", "1", "#"], ["1,024", "4,000", "#" * 40]]


def test_an_earlier_data_set_is_shown_with_its_own_counts_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/earlier_version has a data set that was built when the validation split was called `held_out`."""
    manifest = json.loads((Path(__file__).parents[2] / "earlier_version" / "data" / "manifest.json").read_text())
    manifest["counts"]["mended: not UTF-8"] = 7
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert main(["data", "show", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"mended: not UTF-8 +7 *\n", text)
    assert re.search(r"validation +39 +5 +5 +1,218 ", text)
    assert main(["data", "show", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["held_out_share"] == 0.1
