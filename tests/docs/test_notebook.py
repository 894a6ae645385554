"""The notebook's cells work on a small run, without Jupyter and without matplotlib."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "read_a_run.ipynb"


def test_the_cells_read_a_run_and_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    names: dict[str, object] = {}
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        assert not cell.get("outputs"), f"cell {number} has outputs: clear them"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert "step      1  loss 5.95" in shown
    assert "finished" in shown
    assert "step-00000004 with" in shown
    assert "model.embed.weight" in shown
