"""The options of `keepstep prove`, without runs."""

import shutil
from pathlib import Path

import pytest

from launch.cli import main


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give a recipe, or --replay RUN --step N"),
        (["recipes/laptop.yaml", "--steps", "5"], r"--steps (5) must be at least 8"),
        (["--replay", "no/such/run", "--step", "3"], "is not a run's folder"),
        (["--replay", "no/such/run"], "--replay needs --step N"),
    ],
)
def test_a_wrong_option_is_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["prove", *argv, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_an_output_folder_that_is_not_empty_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["prove", "recipes/laptop.yaml", "--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    shutil.rmtree(tmp_path)
