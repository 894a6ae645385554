import json
import re
from itertools import islice
from pathlib import Path

import pytest

from data_pipeline.stream.stream import open_stream
from launch.cli import main
from launch.data import audit
from launch.data.runs import open_run


def test_a_recipe_that_has_not_run_is_audited(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "audit", str(recipe), "--ranks", "1,2,5"]) == 0
    text = capsys.readouterr().out
    assert "720 samples are the same on 1, 2, 5 ranks; no row comes twice in an epoch" in text
    assert re.search(r"/set +0 +(\d+) +\1 +complete, every row once", text)
    assert re.search(r"/set +\d +\d+ +\d+ +\d+ rows not yet used", text)
    assert "no counters were compared" in text


def test_the_audit_is_printed_as_json(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "audit", str(recipe), "--ranks", "1,2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["samples"], shown["world_sizes"], shown["counters_compared"]) == (720, [1, 2], False)
    first = shown["epochs"][0]
    assert (first["source"], first["epoch"], first["complete"]) == (str(recipe.parent / "set"), 0, True)
    assert first["seen"] == first["rows"]


def test_the_counters_of_a_run_are_audited(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The states that a checkpoint would contain replace those of a checkpoint."""
    loaded, _ = open_run(recipe)
    states = []
    for rank in range(2):
        with open_stream(loaded.data, seq_len=16) as stream:
            steps = stream.steps(first_step=0, global_batch_size=8, micro_batch_size=4, rank=rank, world_size=2)
            list(islice(steps, 30))
            states.append(stream.state(30))
    monkeypatch.setattr(audit, "open_run", lambda path: (loaded, states))
    assert main(["data", "audit", str(recipe)]) == 0
    assert "240 samples" in (text := capsys.readouterr().out)
    assert "the counters of the newest checkpoint agree with the plan" in text
    states[1]["counters"][0][2] += 1
    assert main(["data", "audit", str(recipe)]) == 2
    assert "the run's counters differ from its plan" in capsys.readouterr().err


def test_the_newest_checkpoint_of_a_run_is_audited(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """tests/earlier_version has a run of 4 steps, and the data set that it read, which is now at another path."""
    earlier = Path(__file__).parents[2] / "earlier_version"
    (tmp_path / "checkpoints").symlink_to(earlier / "run" / "checkpoints")
    recipe = (earlier / "run" / "recipe.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(recipe.replace("/tmp/baseline/old/data", str(earlier / "data")))
    assert main(["data", "audit", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "16 samples are the same on 1, 2, 3, 4, 8 ranks" in text
    assert "the counters of the newest checkpoint agree with the plan" in text
