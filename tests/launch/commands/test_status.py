"""The state of a run, and the request to stop it, by its folder alone."""

import json
import os
import re
import time
from dataclasses import asdict, replace

import psutil
import pytest

from launch import cli
from launch.supervise.rank_logs import Failure
from train.health.lease import Holder


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
    assert status(folder, capsys)["state"] == "finished"


def test_status_is_readable(folder, capsys):
    record = {"time": time.time(), "step": 7, "loss": 2.5, "tokens_per_second": 12345.6, "mfu": 0.4123}
    write(folder, "metrics.jsonl", record, {"step": 7, "validation_loss": 2.75})
    event = {"time": 1000.0, "uptime": 3.0, "kind": "saved", "step": 5, "bytes": 12_300_000, "stall_seconds": 0.04804}
    write(folder, "events.jsonl", event | {"error": None})
    (folder / "checkpoints/step-00000005").mkdir(parents=True)
    assert cli.main(["status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder}: running"
    facts = {line[:20].strip(): line[20:].strip() for line in lines[1:7]}
    assert re.fullmatch(r"7 of 100, .+ ago", facts["step"])
    assert facts["loss"] == "2.5000"
    assert facts["validation loss"] == "2.7500 at step 7"
    assert facts["speed"] == "12,346 tokens/s, MFU 41.2%"
    assert facts["newest checkpoint"] == "step 5"
    assert lines[-1].split(maxsplit=3)[2:] == ["saved", "step 5, 12.3 MB, stall 48 ms"]


def test_stragglers_are_shown(folder, capsys):
    write(folder, "events.jsonl", {"time": time.time(), "kind": "started", "attempt": 1})
    ranks = [{"rank": n, "host": f"n{n}", "phase": "forward", "probe_seconds": 0.001 * n} for n in (1, 2)]
    (folder / "status.json").write_text(json.dumps({"idle_seconds": 3.2, "slow": [2], "ranks": ranks}))
    assert cli.main(["status", str(folder)]) == 0
    facts = dict(line.strip().split("  ", maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:4])
    facts = {name: value.strip() for name, value in facts.items()}
    assert facts["ranks"] == "2: 2 in forward; last progress 3.2 s before"
    assert facts["straggler"] == "rank 2 on n2: its probe took 2.00 ms"


def test_runs_with_the_earlier_names_of_metrics_are_read(folder, capsys):
    write(folder, "metrics.jsonl", {"step": 7, "loss": 2.5, "share_of_peak": 0.4}, {"step": 7, "held_out_loss": 2.75})
    found = status(folder, capsys)
    assert (found["share_of_measured_peak"], found["validation_loss"]) == (0.4, 2.75)


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
    assert lines[1].startswith("  root cause: rank 3 on n2 failed first (exit code 1) at ")
    assert lines[2:4] == ["    | last words of 3", "    full log: logs/n2/rank-3.log"]
    write(folder, "events.jsonl", {"time": 103.0, "kind": "started", "attempt": 2})
    assert status(folder, capsys)["root_cause"] is None


def test_a_run_that_failed_before_its_recipe_was_saved_is_shown(tmp_path, capsys):
    write(tmp_path, "events.jsonl", {"time": time.time(), "kind": "failed", "error": "no data set"})
    found = status(tmp_path, capsys)
    assert (found["state"], found["steps"]) == ("failed", None)


def test_stop_makes_the_file_that_the_run_looks_for(folder, capsys):
    assert cli.main(["stop", str(folder)]) == 0
    assert (folder / "STOP").exists()
    assert "asked" in capsys.readouterr().out
    assert status(folder, capsys)["stop_requested"]
    assert cli.main(["stop", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": str(folder), "stop_requested": True, "jobs": []}


def test_a_run_that_has_ended_is_not_asked_to_stop(folder, capsys):
    write(folder, "events.jsonl", {"time": time.time(), "kind": "stopped", "step": 7})
    assert cli.main(["stop", str(folder)]) == 2
    assert "is not running: it has stopped; end a pending Slurm job with scancel" in capsys.readouterr().err
    assert not (folder / "STOP").exists()


@pytest.mark.parametrize("command", ["status", "stop"])
def test_a_folder_that_is_not_a_run_is_refused(tmp_path, capsys, command):
    assert cli.main([command, str(tmp_path)]) == 2
    assert "is not a run folder (it has no recipe.yaml)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def holder(pid: int, host: str | None = None) -> dict:
    me = Holder.this_process({})
    return asdict(replace(me, pid=pid, host=host or me.host))


def hold(folder, pid: int, host: str | None = None) -> None:
    (folder / "lease.json").write_text(json.dumps({"holder": holder(pid, host), "count": 3}))


def test_a_killed_run_is_interrupted_as_soon_as_its_process_is_gone(folder, capsys):
    write(folder, "events.jsonl", {"time": time.time(), "kind": "started", "attempt": 1})
    hold(folder, os.getpid())
    assert status(folder, capsys)["state"] == "running"
    hold(folder, 2**22 + 1)  # above the largest process number
    assert status(folder, capsys)["state"] == "interrupted"
    assert cli.main(["status", str(folder)]) == 0
    assert "the same command resumes it" in capsys.readouterr().out
    assert cli.main(["stop", str(folder)]) == 2
    assert "is not running: it was interrupted (killed, or its node is lost)" in capsys.readouterr().err
    assert not (folder / "STOP").exists()


def test_a_run_on_another_machine_is_interrupted_when_its_lease_is_no_longer_renewed(folder, capsys):
    write(folder, "events.jsonl", {"time": time.time(), "kind": "started", "attempt": 1})
    hold(folder, 1, host="elsewhere")
    assert status(folder, capsys)["state"] == "running"
    os.utime(folder / "lease.json", (0.0, time.time() - 60))
    assert status(folder, capsys)["state"] == "interrupted"


def test_a_new_attempt_runs_although_the_last_event_is_the_end_of_the_one_before(folder, capsys):
    write(folder, "events.jsonl", {"time": psutil.Process().create_time() - 5, "kind": "stopped", "step": 7})
    assert status(folder, capsys)["state"] == "stopped"
    hold(folder, os.getpid())
    assert status(folder, capsys)["state"] == "running"


def test_the_failure_of_a_refused_second_start_is_not_that_of_the_healthy_run(folder, capsys):
    write(folder, "events.jsonl", {"time": 100.0, "kind": "started", "attempt": 1})
    (folder / "logs/n2").mkdir(parents=True)
    Failure(101.0, 0, "n2", "exit code 2", (False, False, False), "", ["is in use"]).save(folder / "logs/n2")
    hold(folder, os.getpid())
    assert status(folder, capsys)["root_cause"] is None
    hold(folder, 2**22 + 1)
    assert status(folder, capsys)["root_cause"]["host"] == "n2"


def test_a_pending_run_shows_its_jobs_and_can_be_stopped(tmp_path, capsys):
    write(tmp_path, "events.jsonl", {"time": time.time(), "kind": "submitted", "jobs": ["7", "8"]})
    assert status(tmp_path, capsys)["state"] == "pending"
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "Slurm jobs         7, 8; `squeue --job 7,8` shows them" in capsys.readouterr().out
    assert cli.main(["stop", str(tmp_path)]) == 0
    assert "wait end as they start (`scancel 7 8` ends them now)" in capsys.readouterr().out
    assert not (tmp_path / "STOP").exists()
    assert status(tmp_path, capsys)["state"] == "stopped"
    assert cli.main(["stop", str(tmp_path)]) == 2


def test_a_stop_reaches_the_jobs_that_wait_behind_one_that_has_ended(folder, capsys):
    write(folder, "events.jsonl", {"time": time.time(), "kind": "submitted", "jobs": ["7", "8"]})
    write(folder, "events.jsonl", {"time": time.time(), "kind": "stopped", "step": 7})
    assert cli.main(["stop", str(folder)]) == 0
    assert "`scancel 7 8`" in capsys.readouterr().out
    assert not (folder / "STOP").exists()


def test_a_step_beyond_the_recipe_is_not_shown_as_a_part_of_it(folder, capsys):
    write(folder, "metrics.jsonl", {"time": time.time(), "step": 190, "loss": 2.5})
    assert cli.main(["status", str(folder)]) == 0
    assert "190 (beyond the recipe's last, 100), " in capsys.readouterr().out


def test_several_runs_are_a_table_of_one_line_each(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/done", "runs/broken", "runs/no-run", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    write(
        tmp_path / "runs/done",
        "events.jsonl",
        {"time": 1000.0, "uptime": 1.0, "kind": "submitted", "jobs": ["41"]},
        {"time": 1000.0, "uptime": 1.0, "kind": "started", "attempt": 3},
        {"time": 1009.0, "uptime": 10.0, "kind": "finished", "step": 8, "seconds": {"start": 2.0, "step": 8.0}},
    )
    write(tmp_path / "runs/done", "metrics.jsonl", {"step": 8, "loss": 2.5, "tokens_per_second": 1234.5, "mfu": 0.4})
    failed = {"time": 1000.0, "uptime": 1.0, "kind": "failed", "error": "no data set"}
    write(tmp_path / "runs/broken", "events.jsonl", failed)
    write(tmp_path / "elsewhere", "events.jsonl", {"time": 1000.0, "uptime": 1.0, "kind": "started", "attempt": 1})
    hold(tmp_path / "elsewhere", os.getpid())
    assert cli.main(["status"]) == 0
    head, broken, done = (re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines())
    assert head[:3] == ["run", "state", "step"]
    assert broken == ["runs/broken", "failed", "0", "no data set"]
    assert done == ["runs/done", "finished", "8", "2.5000", "1,234 (MFU 40%)", "80%", "2", "41"]
    assert cli.main(["status", "runs", "elsewhere", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["run"], one["state"]) for one in runs] == [
        ("runs/broken", "failed"),
        ("runs/done", "finished"),
        ("elsewhere", "running"),
    ]
    assert runs[2]["holder"].startswith(f"process {os.getpid()} on ")


def test_the_rank_that_failed_first_is_in_the_table(folder, capsys):
    write(folder, "events.jsonl", {"time": 100.0, "kind": "started", "attempt": 1})
    (folder / "logs/n2").mkdir(parents=True)
    Failure(101.0, 3, "n2", "exit code 1", (False, False, False), "", ["Traceback", "OOM", " "]).save(
        folder / "logs/n2"
    )
    assert cli.main(["status", str(folder), str(folder), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["cause"] == "rank 3 on n2: exit code 1: OOM"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "runs/ does not exist here; name run folders, or a folder that has some"),
        (["RUN", "RUN/logs"], "logs is not a run folder"),
        (["RUN/..", "--events", "3"], "--events (3) is for one run, and there are 1; name one run folder"),
    ],
)
def test_a_wrong_list_of_runs_is_refused_in_one_line(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/run").mkdir(parents=True)
    write(tmp_path / "mine/run", "events.jsonl", {"time": 100.0, "kind": "started", "attempt": 1})
    assert cli.main(["status", *(one.replace("RUN", str(tmp_path / "mine/run")) for one in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
