"""Where a run stands, and asking it to stop, by its folder alone."""

import json
import os
import time

import pytest

from launch import cli
from launch.supervise.rank_logs import Failure


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "recipe.yaml").write_text("train:\n  steps: 100\n")
    return tmp_path


def write(folder, name, *records):
    with (folder / name).open("a") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)


def status(folder, capsys) -> dict:
    assert cli.main(["status", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_new_then_running_then_silent_then_finished(folder, capsys):
    assert status(folder, capsys)["state"] == "new"
    write(folder, "events.jsonl", {"time": time.time(), "kind": "started", "attempt": 1})
    write(folder, "metrics.jsonl", {"time": time.time(), "step": 7, "loss": 2.5, "tokens_per_second": 1e4})
    found = status(folder, capsys)
    assert (found["state"], found["step"], found["steps"], found["loss"]) == ("running", 7, 100, 2.5)
    for name in ("events.jsonl", "metrics.jsonl"):
        os.utime(folder / name, (0.0, time.time() - 3600))
    assert status(folder, capsys)["state"] == "silent"
    write(folder, "events.jsonl", {"time": time.time(), "kind": "finished", "step": 100})
    write(folder, "events.jsonl", {"time": time.time(), "kind": "ended"})
    assert status(folder, capsys)["state"] == "finished"


def test_status_reads_like_a_sentence(folder, capsys):
    write(folder, "metrics.jsonl", {"time": time.time(), "step": 7, "loss": 2.5, "tokens_per_second": 12345.6})
    (folder / "checkpoints/step-00000005").mkdir(parents=True)
    assert cli.main(["status", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "step 7 of 100, loss 2.5000, 12,346 tokens/s, last step 0 s ago" in out
    assert "newest checkpoint: step 5" in out


def test_the_root_cause_of_the_newest_attempt_comes_first(folder, capsys):
    def fail(host: str, rank: int, ending: str, seconds: float, *suspicion: bool) -> None:
        (folder / "logs" / host).mkdir(parents=True, exist_ok=True)
        log = f"logs/{host}/rank-{rank}.log"
        Failure(seconds, rank, host, ending, suspicion, log, [f"last words of {rank}"]).save(folder / "logs" / host)

    write(folder, "events.jsonl", {"time": 100.0, "kind": "started", "attempt": 1})
    fail("n1", 0, "exit code 1", 101.0, False, True, True)  # only lost a peer
    fail("n2", 3, "exit code 1", 102.0, False, False, True)
    assert cli.main(["status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  root cause: rank 3 on n2 ended by exit code 1 at ")
    assert lines[2:4] == ["    | last words of 3", "    all of it: logs/n2/rank-3.log"]
    write(folder, "events.jsonl", {"time": 103.0, "kind": "started", "attempt": 2})
    assert status(folder, capsys)["root_cause"] is None


def test_a_run_that_failed_before_its_recipe_was_saved_is_shown(tmp_path, capsys):
    write(tmp_path, "events.jsonl", {"time": time.time(), "kind": "failed", "error": "no data set"})
    found = status(tmp_path, capsys)
    assert (found["state"], found["steps"]) == ("failed", None)


def test_stop_leaves_the_file_that_the_run_looks_for(folder, capsys):
    assert cli.main(["stop", str(folder)]) == 0
    assert (folder / "STOP").exists()
    assert "asked" in capsys.readouterr().out
    assert status(folder, capsys)["stop_requested"]


def test_a_run_that_has_ended_is_not_asked_to_stop(folder, capsys):
    write(folder, "events.jsonl", {"time": time.time(), "kind": "stopped", "step": 7})
    assert cli.main(["stop", str(folder)]) == 2
    assert "does not run: it has stopped; a job that waits is ended with scancel" in capsys.readouterr().err
    assert not (folder / "STOP").exists()


@pytest.mark.parametrize("command", ["status", "stop"])
def test_what_is_no_run_folder_is_refused(tmp_path, capsys, command):
    assert cli.main([command, str(tmp_path)]) == 2
    assert "is not a run folder (it has no recipe.yaml)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
