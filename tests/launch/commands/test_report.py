import json
from pathlib import Path

import pytest

from launch.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Killed after step 2, resumed from step 1."""
    events = [
        {"kind": "started", "attempt": 1, "time": 1000.0, "uptime": 0.0},
        {"kind": "started", "attempt": 2, "time": 1020.0, "uptime": 0.0},
        {"kind": "finished", "time": 1030.0, "uptime": 10.0, "seconds": {"checkpoint_stall": 1.0}},
    ]
    records = [
        {"step": 1, "attempt": 1, "seconds": {"start": 4.0, "step": 4.0}},
        {"step": 2, "attempt": 1, "seconds": {"step": 4.0}},
        {"step": 2, "attempt": 2, "seconds": {"start": 4.0, "step": 3.0, "data_wait": 2.0}},
        {"step": 2, "validation_loss": 3.0},
    ]
    for name, lines in (("events", events), ("metrics", records)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_the_report_tells_where_the_time_went(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    text = capsys.readouterr().out
    assert "goodput 23.3% of 30.0 s in 2 attempts; 2 steps kept, 1 lost" in text
    lines = {line[:27].strip(): line.split()[-3:] for line in text.splitlines() if line.endswith("%")}
    assert lines["work that was lost"] == ["4.0", "s", "13.3%"]
    assert lines["down between attempts"] == ["8.0", "s", "26.7%"]
    assert "1 finished, 2 started" in text


def test_the_report_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["goodput"] == 7 / 30
    assert told["total_seconds"] == 30.0
    assert told["seconds"]["start"] == 8.0
    assert (told["attempts"], told["kept_steps"], told["lost_steps"]) == (2, 2, 1)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "events.jsonl does not exist; give the folder of a run" in capsys.readouterr().err
