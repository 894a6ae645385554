"""The picture of the scale curve."""

import sys

import pytest

from launch import cli
from launch.plan.chart import draw_scale
from train.errors import ConfigError

CURVE = ["plan", "recipes/llama-8b.yaml", "--gpus", "64", "--scale", "--png"]


def test_the_curve_is_drawn_beside_the_table(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "scale.png"
    assert cli.main([*CURVE, str(path)]) == 0
    assert "tokens/s per GPU" in capsys.readouterr().out
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "message"), [("scale.gif", "must end in one of .png"), ("absent/scale.png", "cannot be written: No such")]
)
def test_a_file_that_cannot_be_drawn_is_refused_in_one_line(tmp_path, capsys, name, message):
    pytest.importorskip("matplotlib")
    assert cli.main([*CURVE, str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main([*CURVE, str(tmp_path / "scale.png")]) == 2
    assert 'pip install "keepstep[plots]"' in capsys.readouterr().err


def test_an_empty_curve_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no curve to draw"):
        draw_scale([], tmp_path / "scale.png", "none")
