"""No content of a log blocks a command or a start: what is no record is skipped and counted."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import cli
from launch.supervise import requeue
from tests.train.test_loop import STEPS, Job, data
from train.exit_codes import FINISHED
from train.records import jsonl
from train.records.events import events_backwards, read_events
from train.records.jsonl import LINE_BYTES, last_record, read_backwards, read_jsonl

__all__ = ["data"]

EVENTS = [
    {"time": 1e9, "uptime": 1.0, "kind": "started", "attempt": 1, "world_size": 1, "previous": None},
    {"time": 1e9 + 9, "uptime": 10.0, "kind": "booked", "step": 5, "seconds": {"start": 4.0, "step": 6.0}},
    {"time": 1e9 + 9, "uptime": 10.0, "kind": "saved", "step": 5, "bytes": 100, "stall_seconds": 0.1, "removed": []},
    {"time": 1e9 + 19, "uptime": 20.0, "kind": "stopped", "step": 7, "reason": "SIGTERM", "seconds": {"step": 10.0}},
]
METRICS = [{"time": 1e9, "step": step, "loss": 3.0, "grad_norm": 1.0, "attempt": 1, "uptime": 9.0} for step in (6, 7)]
NO_RECORDS = [
    b"\xff\xfe\x00",
    bytes(1000),
    b"null",
    b"[]",
    b"7",
    b'"started"',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"9" * 5000,
    b'{"time": 1e9, "uptime": 1.0, "kind": "failed", "error": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"time": 1e9, "uptime": 1.0, "kind": "failed", "error": ' + b'{"a":' * 20 + b"1" + b"}" * 21,
    b'{"time": 1e9, "uptime": 1.0, "kind": "stopped", "seconds": {"step": {"a": 1}}}',
    b"{" + b" " * (LINE_BYTES + 5) + b"}",
    b'{"time": 1e9, "uptime": 1.0, "kind": "sta\xc3rted", "attempt": 2}',
    b'{"time": 1e9, "uptime": 1.0, "kind": ["started"], "attempt": 2}',
    b'{"time": "now", "uptime": 1.0, "kind": "started", "attempt": 2}',
    b'{"time": 1e300, "uptime": 1.0, "kind": "started", "attempt": 2}',
    b'{"time": -5, "uptime": 1.0, "kind": "failed", "error": "x"}',
    b'{"time": NaN, "uptime": Infinity, "kind": "finished", "seconds": {}}',
    b'{"time": 1e9, "uptime": 1.0, "kind": "started", "attempt": true}',
    b'{"time": 1e9, "uptime": 1.0, "kind": "started", "attempt": 1e9999}',
    b'{"time": 1e9, "uptime": 1.0, "kind": "booked", "step": -1, "seconds": {"step": 1.0}}',
    b'{"time": 1e9, "uptime": 1.0, "kind": "stopped", "seconds": {"step": "long"}}',
    b'{"time": 1e9, "uptime": 1.0, "kind": "submitted", "jobs": 7}',
    b'{"time": 1e9, "uptime": 1.0, "kind": "failed", "exit_code": 99999999999999999999}',
]
NO_METRICS = [
    b'{"time": 1e9, "step": "7", "loss": 3.0, "attempt": 1, "uptime": 9.0}',
    b'{"time": 1e9, "step": 7, "loss": [3.0], "attempt": 1, "uptime": 9.0}',
    b'{"time": 1e9, "step": 7, "loss": 3.0, "tokens_per_second": "fast", "attempt": 1, "uptime": 9.0}',
    b'{"time": 1e9, "step": 7, "validation_loss": null, "attempt": 1, "uptime": 9.0}',
    b'{"time": 1e9, "step": 7, "loss": 3.0, "attempt": "last", "uptime": 9.0}',
]


def as_lines(records: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(record).encode() for record in records]


def write_run(folder: Path, events: list[bytes], metrics: list[bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text("train:\n  steps: 10\n")
    (folder / "events.jsonl").write_bytes(b"".join(line + b"\n" for line in events))
    (folder / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in metrics))
    return folder


def answers(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Any, ...]:
    """What all readers of the logs of a run say."""
    said: list[Any] = []
    for command in (["status"], ["report", "--text"]):
        assert cli.main([command[0], str(run), "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out))
        assert cli.main([*command, str(run)]) == 0
        capsys.readouterr()
    said[0].pop("silent_seconds")
    said.append(requeue.ending(run, 0.0, 1))
    said.append(requeue.stopped_while_waiting(run, "2001-09-09T00:00:00"))
    return tuple(said)


@pytest.mark.parametrize("line", NO_RECORDS + NO_METRICS, ids=range(len(NO_RECORDS + NO_METRICS)))
def test_a_line_that_is_no_record_changes_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    events, metrics = as_lines(EVENTS), as_lines(METRICS)
    wanted = answers(write_run(tmp_path / "run", events, metrics), capsys)
    for number in range(len(EVENTS) + 1):
        spoiled = events if line in NO_METRICS else [*events[:number], line, *events[number:]]
        run = write_run(tmp_path / "run", spoiled, [*metrics[:number], line, *metrics[number:]])
        assert answers(run, capsys) == wanted


@settings(max_examples=200, derandomize=True)
@given(st.data())
def test_a_flipped_bit_never_stops_a_reader(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    run = tmp_path_factory.getbasetemp() / "flipped"
    contents = [bytearray(b"\n".join(as_lines(records)) + b"\n") for records in (EVENTS, METRICS)]
    content = data.draw(st.sampled_from(contents))
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    write_run(run, [bytes(contents[0])], [bytes(contents[1])])
    for command in (["status"], ["report", "--text"]):
        assert cli.main([*command, str(run)]) == 0
    requeue.ending(run, 0.0, 1)
    assert cli.main(["stop", str(run)]) in (0, 2)  # the flipped bit may hide that the run has stopped


def test_skipped_lines_are_counted_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\n".join([b"null", *as_lines(EVENTS), b"[]", b'{"kind": "torn']))
    for _ in range(3):
        assert len(list(read_events(path))) == len(EVENTS)
    assert caplog.messages == [f"{path}: lines that are no records were skipped: 2"]


def test_both_ends_of_a_file_give_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 64)
    monkeypatch.setattr(jsonl, "LINE_BYTES", 300)
    path = tmp_path / "metrics.jsonl"
    lines = [
        b"",
        b"x" * 900,
        b'{"step": 1}',
        b'{"step": 2, "note": "' + b"y" * 400 + b'"}',
        b'{"step": 3}',
        b"\0" * 299,
    ]
    path.write_bytes(b"\n".join(lines * 5 + [b'{"step": 4}']))
    forwards = list(read_jsonl(path))
    assert [record["step"] for record in forwards] == [1, 3] * 5 + [4]
    assert list(read_backwards(path)) == forwards[::-1]


def test_the_end_of_a_file_is_read_without_the_rest_of_it(tmp_path: Path) -> None:
    for name, records in (("events.jsonl", EVENTS), ("metrics.jsonl", METRICS)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 38)  # 256 GiB of nothing, which no reader could get through
            file.seek(0, os.SEEK_END)
            file.write(b"\n" + b"\n".join(as_lines(records)) + b"\n")
    assert last_record(tmp_path / "metrics.jsonl", "attempt") == METRICS[-1]
    assert next(events_backwards(tmp_path / "events.jsonl", ["started"])) == EVENTS[0]


@pytest.mark.parametrize("name", ["recipe.yaml", "events.jsonl", "metrics.jsonl", "lease.json", "status.json"])
def test_a_fifo_in_a_run_folder_hangs_no_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    run = write_run(tmp_path / "run", as_lines(EVENTS), as_lines(METRICS))
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert cli.main(["status", str(run)]) == 0
    assert cli.main(["report", str(run), "--text"]) == 0
    assert cli.main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert cli.main(["stop", str(run)]) == (0 if name == "events.jsonl" else 2)
    assert cli.main(["run", str(run / "recipe.yaml")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 0x80
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flipped, fifo, folder])
def test_damaged_logs_do_not_block_a_resume(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    job = Job(tmp_path, data)
    assert job.train(monkeypatch) == FINISHED
    shutil.rmtree(job.folder / f"checkpoints/step-{STEPS:08d}")
    for name in ("events.jsonl", "metrics.jsonl"):
        damage(job.folder / name)
    assert job.train(monkeypatch) == FINISHED
    assert job.checkpoints()[-1] == f"step-{STEPS:08d}"
    if damage is flipped:
        assert [event["attempt"] for event in job.events("started")] == [2], "the first start is the damaged line"


def test_a_terminal_does_not_obey_what_a_log_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\r"
    failed = {"time": 1e9 + 30, "uptime": 20.0, "kind": "failed" + evil, "rank": 0, "error": evil}
    run = write_run(tmp_path / "run", as_lines([*EVENTS, failed]), as_lines(METRICS))
    assert cli.main(["status", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "\ufffd]0;owned\ufffd" in shown
    assert not set(shown) & set("\x1b\x07\x9b\r")
