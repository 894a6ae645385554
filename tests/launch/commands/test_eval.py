"""`keepstep eval` finds the loss that the run logged, and refuses what it cannot evaluate in one line."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from tests.data_pipeline.conftest import tokenizer  # noqa: F401 - a fixture
from tests.data_pipeline.sets import build, documents
from train.checkpoint.format.reader import Reader

EARLIER = Path(__file__).parents[2] / "earlier_version"
RUN, DATA = EARLIER / "run", EARLIER / "data"
LOGGED = 5.922234565980973
"""Validation loss in the manifest of the checkpoint, which an earlier version computed."""


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["eval", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_loss_is_the_one_that_the_run_logged(capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(capsys, str(RUN), "--data", str(DATA))
    assert found["loss"] == pytest.approx(LOGGED, abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(LOGGED), rel=1e-6)
    assert (found["step"], found["logged_loss"]) == (4, LOGGED)


def test_the_size_of_batches_changes_nothing_and_the_number_of_rows_does(capsys: pytest.CaptureFixture[str]) -> None:
    one = evaluate(capsys, str(RUN), "--data", str(DATA), "train.micro_batch_size=1")
    assert one["loss"] == pytest.approx(LOGGED, abs=1e-6)
    whole = evaluate(capsys, str(RUN), f"data.sources.0.path={DATA}", "train.eval_sequences=0")
    assert whole["tokens"] > one["tokens"]
    assert whole["loss"] != pytest.approx(LOGGED, abs=1e-3)


def test_each_source_has_its_loss(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(DATA, tmp_path / name)
    arguments = [str(RUN), "--data", str(tmp_path / "a"), "--data", str(tmp_path / "b"), "train.eval_sequences=0"]
    found = evaluate(capsys, *arguments)
    assert found["sources"]["a"] == found["sources"]["b"]
    assert found["loss"] == pytest.approx(found["sources"]["a"]["loss"], abs=1e-9)
    assert main(["eval", *arguments]) == 0
    shown = capsys.readouterr().out
    assert f"validation loss    {found['loss']:.4f} nats per token" in shown
    assert "\na " in shown


def damaged(folder: Path) -> Path:
    shutil.copytree(RUN, folder)
    checkpoint = folder / "checkpoints/step-00000004"
    (piece,) = Reader(checkpoint).manifest["tensors"]["model.embed.weight"]["pieces"]
    shard = checkpoint / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[piece["start"]] ^= 1
    shard.write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("no run", "has no checkpoint; name a run folder"),
        ("damaged", "does not match its checksum; name an older checkpoint"),
        ("no data", "name its new place: --data FOLDER"),
        ("no validation rows", "has no validation rows"),
        ("another tokenizer", "has another tokenizer than the checkpoint was trained with"),
        ("another setting", "model.n_heads does not change an evaluation"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(
    case: str,
    said: str,
    tmp_path: Path,
    tokenizer: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, data, more = RUN, DATA, []
    match case:
        case "no run":
            run = tmp_path
        case "damaged":
            run = damaged(tmp_path / "run")
        case "no data":
            data = tmp_path / "gone"
        case "no validation rows":
            data = tmp_path / "set"
            build(data, documents(50), DATA / "tokenizer", validation_share=0)
        case "another tokenizer":
            data = tmp_path / "set"
            build(data, documents(50), tokenizer, validation_share=0.2)
        case _:
            more = ["model.n_heads=4"]
    capsys.readouterr()
    assert main(["eval", str(run), "--data", str(data), *more]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert said in err
