"""`keepstep board`: TensorBoard is really started, asked, and ended."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from launch import cli
from launch.commands.monitoring.board import board_command
from train.exit_codes import FAILED_FOR_GOOD
from train.run_folder import RunFolder
from train.sinks.resumable import SinkState

ROOT = Path(__file__).parents[4]
READY = re.compile(r"http://127\.0\.0\.1:(\d+)/")


def make_run(root: Path, name: str, losses: tuple[float, ...]) -> Path:
    """Writes a run folder with a curve: the second attempt computes its last step again."""
    from train.sinks.tensorboard_sink import TensorBoardSink

    folder = RunFolder(root / name)
    folder.root.mkdir(parents=True)
    folder.recipe.write_text("name: x\n")
    for first in (1, len(losses)):
        sink = TensorBoardSink(folder.tensorboard, SinkState(folder.root / "state.json"), first, {})
        for step in range(first, len(losses) + 1):
            sink.log(step, {"train/loss": losses[step - 1]})
        sink.close()
    return folder.root


def asked(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=600) as answer:
        return json.loads(answer.read())


def test_it_shows_the_curves_on_the_loopback_interface_and_ends_by_its_process_id(tmp_path: Path) -> None:
    run = make_run(tmp_path, "laptop", (3.0, 2.0, 1.5))
    before = sorted(path.name for path in run.rglob("*"))
    command = [sys.executable, "-m", "launch.cli", "board", str(run), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as board:
        try:
            assert board.stderr is not None
            port = int(next(found for line in board.stderr if (found := READY.search(line)))[1])
            tags, limit = asked(port, "/data/plugin/scalars/tags"), time.monotonic() + 600
            while not tags.get(".") and time.monotonic() < limit:  # it reads the files after it has begun to answer
                tags = asked(port, "/data/plugin/scalars/tags")
            assert set(tags["."]) == {"train/loss"}
            points = asked(port, "/data/plugin/scalars/scalars?run=.&tag=train%2Floss")
            assert [(step, value) for _, step, value in points] == [(1, 3.0), (2, 2.0), (3, 1.5)]
            os.kill(board.pid, signal.SIGTERM)
            board.wait(timeout=600)
        finally:
            board.kill()
    assert sorted(path.name for path in run.rglob("*")) == before


def test_several_runs_are_named_after_their_folders(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name, (1.0,)) for name in ("one", "two")]
    command = board_command(runs, 7000)
    assert command[command.index("--logdir_spec") + 1] == f"one:{runs[0]}/tensorboard,two:{runs[1]}/tensorboard"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[-2:] == ["--port", "7000"]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / parent, "run", (1.0,)) for parent in ("a", "b")]
    command = board_command(runs, None)
    assert f"{runs[0]}:{runs[0]}/tensorboard," in command[command.index("--logdir_spec") + 1]


def test_what_cannot_be_shown_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = RunFolder(tmp_path / "empty")
    empty.root.mkdir()
    empty.recipe.write_text("name: x\n")
    colon = make_run(tmp_path, "a:b", (1.0,))
    for runs, message in (
        ([tmp_path / "nothing"], "is not a run folder"),
        ([empty.root], "has no curves for TensorBoard"),
        ([colon, make_run(tmp_path, "c", (1.0,))], "has a comma or a colon in its path"),
    ):
        assert cli.main(["board", *map(str, runs)]) == FAILED_FOR_GOOD
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert cli.main(["board", str(colon), "--port", "70000"]) == FAILED_FOR_GOOD
    assert "--port (70000) must be at most 65535" in capsys.readouterr().err
