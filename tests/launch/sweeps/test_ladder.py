"""`keepstep ladder` on four real runs of a second each: fit, prediction, plots and the check of a later run."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.sweeps import ladder_plot
from launch.sweeps.ladder import Ladder, predict
from train.config_file import load_recipe

LADDER = ["--sizes", "8K,12K,16K,22K", "--tokens-per-parameter", "0.2", "optim.lr=5e-3", "model.d_model=8"]


@pytest.fixture(scope="module")
def climbed(recipe: Path) -> Path:
    """The folder of the runs of LADDER, trained by the command, whose output is in the file `climbed` there."""
    runs = recipe.parent / "runs"
    with pytest.MonkeyPatch.context() as patch, (runs.parent / "climbed").open("w+") as out:
        patch.setattr("sys.stdout", out)
        assert main(["ladder", str(recipe), *LADDER]) == 0
    return runs


def test_a_ladder_is_trained_fitted_and_plotted(climbed: Path, recipe: Path) -> None:
    text = (climbed.parent / "climbed").read_text()
    rows = [line.split() for line in text.splitlines() if line.startswith("small-ladder-")]
    assert [row[0] for row in rows] == [f"small-ladder-{size}" for size in ("8K", "12K", "16K", "22K")]
    assert all(row[-2] == "finished" for row in rows)
    losses = [float(row[-1]) for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert "L(N) = E + A / N^a at 0.2" in text
    assert re.search(r"small: [\d,]+ parameters on \S+ tokens: loss \d\.\d{4} nats per token, ", text)
    folder = climbed / "small-ladder"
    found: dict[str, Any] = json.loads((folder / "ladder.json").read_text())
    assert [rung["name"] for rung in found["rungs"]] == [row[0] for row in rows]
    assert [rung["loss"] for rung in found["rungs"]] == pytest.approx(losses, abs=5e-5)
    page = (folder / "ladder.html").read_text()
    assert "Scaling law of small" in page
    assert not re.findall(r"<(?:script|link)[^>]+(?:src|href)=", page), "the page needs no network"
    pytest.importorskip("matplotlib")
    assert (folder / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_shown_again_it_trains_nothing_and_prints_what_the_file_holds(
    climbed: Path, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.sweeps.runs._train", lambda run, ranks: pytest.fail(f"{run.recipe.name} was trained"))
    assert main(["ladder", str(recipe), *LADDER, "--json"]) == 0
    assert main(["ladder", str(recipe), *LADDER, "--show", "--json"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert json.loads(first) == json.loads(second) == json.loads((climbed / "small-ladder/ladder.json").read_text())


def test_a_run_that_leaves_the_band_is_flagged(climbed: Path, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = climbed / "small-ladder/ladder.json"
    whole = file.read_text()
    run = climbed / "small-ladder-16K"
    assert main(["ladder", str(recipe), "--check", str(run)]) == 0
    assert ", inside the band" in capsys.readouterr().out
    found = json.loads(whole)
    exact = {n: 2.0 + 300 / n**0.5 for n in (5000, 7000, 10000, 14000, 20000)}
    found["rungs"] = [{"name": str(n), "parameters": n, "tokens": n // 5, "loss": loss} for n, loss in exact.items()]
    try:
        file.write_text(json.dumps(found))
        assert main(["ladder", str(recipe), "--check", str(run), "--json"]) == 1
        verdict = json.loads(capsys.readouterr().out)
        assert not verdict["inside"]
        assert verdict["loss"] > verdict["predicted"]["high"] or verdict["loss"] < verdict["predicted"]["low"]
        file.write_text("{}")
        assert main(["ladder", str(recipe), "--check", str(run)]) == 2
        assert "ladder.json is no ladder" in capsys.readouterr().err
    finally:
        file.write_text(whole)


def test_runs_that_do_not_compare_are_refused_in_one_line(
    climbed: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert main(["ladder", str(recipe), *words]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]

    run = climbed / "small-ladder-8K"
    assert "is not a run folder" in refused("--check", str(tmp_path))
    assert "ladder.json does not exist; train the ladder first" in refused("--check", str(run), "name=other")
    assert "no model like small has about 1K parameters" in refused("--sizes", "1K")
    assert "0 runs are too few to fit a law" in refused("--show", "--sizes", "8K", "name=other")
    longer = tmp_path / "longer"
    longer.mkdir()
    resolved = (run / "recipe.yaml").read_text()
    (longer / "recipe.yaml").write_text(re.sub(r"^  steps: \d+$", "  steps: 140", resolved, flags=re.MULTILINE))
    for name in ("metrics.jsonl", "events.jsonl"):
        (longer / name).write_text((run / name).read_text())
    assert "tokens per parameter and the ladder 0.2" in refused("--check", str(longer))
    (longer / "events.jsonl").write_text('{"kind": "failed", "time": 1.0}\n')
    assert "longer is failed, and a ladder predicts the loss of finished runs" in refused("--check", str(longer))


def test_a_prediction_says_whether_it_is_for_the_recipes_own_length(recipe: Path) -> None:
    own = load_recipe(recipe, ["train.tokens=10000"])
    sizes = (5000, 7000, 10000, 14000, 20000)

    def ladder(ratio: float) -> Ladder:
        rungs = [{"name": "r", "parameters": n, "tokens": int(ratio * n), "loss": 2 + 300 / n**0.5} for n in sizes]
        return Ladder.model_validate({"recipe": "small", "metric": "train_loss", "rungs": rungs})

    parameters = 320 * 16 + 16 * 3 + 4 * 16 * 16 + 3 * 16 * 64
    near = predict(ladder(own.train.steps * 128 / parameters), ladder(1.09).law(), own)
    far = predict(ladder(20), ladder(20).law(), own)
    assert (near.parameters, near.tokens, near.is_own_length) == (parameters, own.train.steps * 128, True)
    assert (far.tokens, far.is_own_length) == (20 * parameters, False)


def test_without_matplotlib_there_is_no_picture(monkeypatch: pytest.MonkeyPatch, recipe: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rungs = [{"name": "r", "parameters": n, "tokens": 20 * n, "loss": 2 + 300 / n**0.5} for n in (5, 7, 10, 14)]
    ladder = Ladder.model_validate({"recipe": "small", "metric": "train_loss", "rungs": rungs})
    law = ladder.law()
    assert ladder_plot.picture(ladder, law, predict(ladder, law, load_recipe(recipe))) is None
