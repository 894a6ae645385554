from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard")

from tests.train.sinks.curves import tensorboard_curve
from train.sinks.resumable import SinkState
from train.sinks.tensorboard_sink import TensorBoardSink


def opened(folder: Path, first_step: int, settings: Mapping[str, Any] | None = None) -> TensorBoardSink:
    return TensorBoardSink(folder / "board", SinkState(folder / "state.json"), first_step, settings or {})


def log(sink: TensorBoardSink, steps: range, factor: float) -> None:
    for step in steps:
        sink.log(step, {"train/loss": step * factor})


def test_steps_that_a_resumed_run_computes_again_appear_once(tmp_path: Path) -> None:
    log(opened(tmp_path, 1), range(1, 8), 1.0)  # killed: never closed
    newest = max((tmp_path / "board").iterdir())
    newest.write_bytes(newest.read_bytes()[:-5])  # in the middle of a write
    log(opened(tmp_path, 5), range(5, 11), 0.5)
    expected = [(step, float(step)) for step in range(1, 5)] + [(step, step * 0.5) for step in range(5, 11)]
    assert tensorboard_curve(tmp_path / "board", "train/loss") == expected


def test_steps_that_are_computed_again_after_a_roll_back_appear_once(tmp_path: Path) -> None:
    sink = opened(tmp_path, 1)
    log(sink, range(1, 8), 1.0)
    sink.log(7, {"validation/loss": 3.0})
    log(sink, range(4, 10), 0.5)
    sink.close()
    assert [step for step, _ in tensorboard_curve(tmp_path / "board", "train/loss")] == list(range(1, 10))
    assert tensorboard_curve(tmp_path / "board", "train/loss")[3:5] == [(4, 2.0), (5, 2.5)]


def test_an_evaluation_after_a_step_begins_no_new_file(tmp_path: Path) -> None:
    sink = opened(tmp_path, 1)
    sink.log(1, {"train/loss": 1.0})
    sink.log(1, {"validation/loss": 2.0})
    assert len(list((tmp_path / "board").iterdir())) == 1
    assert tensorboard_curve(tmp_path / "board", "train/loss") == [(1, 1.0)]
    assert tensorboard_curve(tmp_path / "board", "validation/loss") == [(1, 2.0)]
    sink.close()


def test_the_recipe_is_there_as_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    for first in (1, 3):
        sink = opened(tmp_path, first, {"optim.lr": 0.001, "optim.algorithm": "adamw", "train.seed": 1})
        log(sink, range(first, 6), 1.0)
        sink.close()
    events: Any = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    content = events.PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
    settings = metadata.parse_session_start_info_plugin_data(content).hparams
    assert settings["optim.lr"].number_value == 0.001
    assert settings["optim.algorithm"].string_value == "adamw"
    assert metadata.SESSION_END_INFO_TAG in events.PluginTagToContent("hparams")


def test_a_sink_asks_for_what_the_last_attempt_did_not_write(tmp_path: Path) -> None:
    assert opened(tmp_path, 5).lacks_from == 1, "the first attempt was killed before it wrote anything"
    (tmp_path / "state.json").unlink(missing_ok=True)
    assert opened(tmp_path, 5).lacks_from == 5, "an earlier version wrote the files"
    log(opened(tmp_path, 5), range(5, 8), 1.0)
    assert opened(tmp_path, 9).lacks_from == 7
    assert opened(tmp_path, 6).lacks_from == 6
