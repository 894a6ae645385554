import json
import re
from pathlib import Path

import pytest

from launch.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was killed after step 2 and resumed from step 1."""
    events = [
        {"kind": "started", "attempt": 1, "time": 1000.0, "uptime": 0.0},
        {"kind": "booked", "step": 1, "time": 1008.0, "uptime": 8.0, "seconds": {"start": 4.0, "step": 4.0}},
        {
            "kind": "started",
            "attempt": 2,
            "time": 1020.0,
            "uptime": 0.0,
            "previous": {"attempt": 1, "step": 2, "uptime": 12.0},
        },
        {"kind": "resumed", "step": 1, "time": 1022.0, "uptime": 2.0},
        {
            "kind": "booked",
            "step": 2,
            "time": 1029.0,
            "uptime": 9.0,
            "seconds": {"start": 4.0, "step": 3.0, "data_wait": 2.0},
        },
        {"kind": "finished", "step": 2, "time": 1030.0, "uptime": 10.0, "seconds": {"checkpoint_stall": 1.0}},
    ]
    records = [{"step": 2, "attempt": 2, "uptime": 9.0}, {"step": 2, "validation_loss": 3.0}]
    for name, lines in (("events", events), ("metrics", records)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_the_report_shows_how_the_time_was_spent(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--text"]) == 0
    text = capsys.readouterr().out
    assert "goodput 23.3% of 30 s in 2 attempts; 2 steps kept, 1 lost" in text
    rows = (line.strip().split("  ", maxsplit=1) for line in text.splitlines() if line.strip().endswith("%"))
    lines = {name: times.split() for name, times in rows}
    assert lines["lost work"] == ["4.0", "s", "13.3%"]
    assert lines["down between attempts"] == ["8.0", "s", "26.7%"]
    assert "2 booked, 1 finished, 1 resumed, 2 started" in text


def test_the_report_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["goodput"] == 7 / 30
    assert report["total_seconds"] == 30.0
    assert report["seconds"]["start"] == 8.0
    assert (report["attempts"], report["kept_steps"], report["lost_steps"]) == (2, 2, 1)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "events.jsonl does not exist; give the folder of a run" in capsys.readouterr().err


def test_the_report_is_a_file_in_this_folder_named_after_the_run(
    run: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    here = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(here)
    assert main(["report", str(run)]) == 0
    (written,) = here.iterdir()
    assert written.name == f"report-{run.name}.html"
    assert f"{written.name}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "--out", "x.html"], r"--out \(x.html\) is for the HTML report; leave out --text and --json"),
        (["RUN"], "a run is named twice; name each run once"),
        (["--out", "RUN/report.html"], "is in the run folder .*, which a report never changes; name another"),
        (["--out", "no/such/folder.html"], "cannot be written"),
        (["nowhere"], "nowhere is not a run folder: nowhere/events.jsonl does not exist; give the folder of a run"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    before = sorted(run.iterdir())
    assert main(["report", str(run), *(one.replace("RUN", str(run)) for one in arguments)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1
    assert sorted(run.iterdir()) == before
