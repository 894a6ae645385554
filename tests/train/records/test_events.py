import json
import logging
from pathlib import Path

import pytest

from train.records.events import EventLog, end_torn_line
from train.records.jsonl import last_record, read_jsonl


def test_events_are_lines_with_both_clocks(tmp_path: Path) -> None:
    record = EventLog(tmp_path / "events.jsonl")
    record("saved", step=3)
    record("finished", step=6)
    first, second = read_jsonl(tmp_path / "events.jsonl")
    assert (first["kind"], first["step"], second["kind"]) == ("saved", 3, "finished")
    assert first["time"] > 1.7e9
    assert 0.0 <= first["uptime"] <= second["uptime"]


def test_what_is_appended_after_a_torn_line_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"kind": "started"}) + '\n{"kind": "sav')
    EventLog(path)("resumed", step=3)
    assert [event["kind"] for event in read_jsonl(path)] == ["started", "resumed"]


def test_a_whole_or_missing_file_is_left_alone(tmp_path: Path) -> None:
    end_torn_line(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "whole").write_text("{}\n")
    end_torn_line(tmp_path / "whole")
    assert (tmp_path / "whole").read_text() == "{}\n"


def test_only_rank_0_writes(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl", enabled=False)("saved", step=3)
    assert not (tmp_path / "events.jsonl").exists()


def test_a_disk_that_takes_no_events_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = EventLog(tmp_path / "no-such-folder" / "events.jsonl")
    with caplog.at_level(logging.WARNING):
        record("saved", step=3)
    assert "an event was not written" in caplog.text
    assert '"step": 3' in caplog.text


def test_the_last_record_with_a_key_is_found_at_the_end_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "attempt": 1}) for step in range(20_000)]
    path.write_text("\n".join([*lines, json.dumps({"step": 20_000, "validation_loss": 1.0}), '{"step": 20_0']))
    assert last_record(path, "attempt") == {"step": 19_999, "attempt": 1}
    assert last_record(path, "nothing") is None
    assert last_record(tmp_path / "absent.jsonl", "attempt") is None
