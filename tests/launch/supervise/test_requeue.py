"""When a job is requeued, and when it must not be."""

import json
from datetime import datetime

import pytest

from launch.diagnose import after_failure
from launch.supervise.requeue import Attempt, decide, ending, main, saved_step
from tests.launch.diagnose.cluster import START, Cluster


def attempt(code: int, why: str = "SIGUSR2", **other) -> Attempt:
    return Attempt(code, why, **({"number": 0, "limit": 3, "progress": True} | other))


@pytest.mark.parametrize(
    ("case", "again", "why"),
    [
        (attempt(0), False, "the run is finished"),
        (attempt(2, "diverged"), False, "failed for good: diverged"),
        (attempt(3, "memory ran out"), False, "failed for good: memory ran out"),
        (attempt(75), True, "stopped (SIGUSR2)"),
        (attempt(75, progress=False), True, "stopped (SIGUSR2)"),
        (attempt(75, "keepstep stop"), False, "stopped by `keepstep stop`"),
        (attempt(75, state="CANCELLED"), False, "the job is CANCELLED"),
        (attempt(75, state="TIMEOUT", reason="TimeLimit"), True, "stopped (SIGUSR2)"),
        (attempt(75, state="COMPLETING", reason="Preempted"), False, "Slurm itself requeues the others"),
        (attempt(75, number=3), False, "gave up after 3 requeues"),
        (attempt(1, "lost a peer"), True, "failed after progress: lost a peer"),
        (attempt(1, "lost a peer", progress=False), False, "failed without progress: lost a peer"),
        (attempt(1, progress=False, unhealthy="n2"), True, "without the unhealthy nodes n2"),
        (attempt(1, number=3, unhealthy="n2"), False, "gave up after 3 requeues"),
    ],
)
def test_a_job_is_requeued_only_with_reason(case, again, why):
    decision, sentence = decide(case)
    assert decision is again
    assert why in sentence


def test_only_the_last_ending_of_this_attempt_counts(tmp_path):
    events = [
        {"time": 10, "kind": "stopped", "reason": "SIGTERM"},
        {"time": 20, "kind": "resumed", "step": 5},
        {"time": 30, "kind": "failed", "exit_code": 2, "error": "bad data"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert ending(tmp_path, 5, 1) == (2, "bad data")
    assert ending(tmp_path, 40, 75) == (75, "exit code 75")
    assert ending(tmp_path, 40, 140) == (75, "SIGUSR2 before the start")
    assert ending(tmp_path, 40, 137) == (1, "the launcher's exit code was 137")


def test_the_script_gets_the_decision_and_the_exit_code_of_the_run(tmp_path, capsys):
    assert main(["mark", str(tmp_path)]) == 0
    mark = capsys.readouterr().out.strip()
    (tmp_path / "checkpoints" / "step-00000020").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-00000040.partial-x").mkdir()
    assert saved_step(tmp_path) == 20
    assert main(["decide", str(tmp_path), "--mark", mark, "--launcher-code", "137", "--limit", "1"]) == 1
    assert capsys.readouterr().out == "requeue: failed after progress: the launcher's exit code was 137\n"
    assert main(["decide", str(tmp_path), "--mark", f"{mark[:-2]}20", "--launcher-code", "137", "--limit", "1"]) == 1
    assert capsys.readouterr().out.startswith("not requeued: failed without progress")


def test_a_requested_stop_prevents_the_requeue_even_if_a_signal_came_as_well(tmp_path, capsys):
    events = [{"time": 5, "kind": "stop_requested"}, {"time": 6, "kind": "stopped", "reason": "SIGUSR2"}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["decide", str(tmp_path), "--launcher-code", "75", "--limit", "3"]) == 75
    assert capsys.readouterr().out == "not requeued: stopped by `keepstep stop`; submit again to resume\n"


def test_a_job_that_waited_when_the_run_was_stopped_does_not_start(tmp_path, capsys):
    asked = datetime(2026, 3, 1, 12, 0, 30, 500_000)
    event = {"time": asked.timestamp(), "kind": "stop_requested"}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    (tmp_path / "STOP").touch()
    for submitted in ("2026-03-01T12:00:30", "2026-03-01T13:00:00", "", "Unknown"):  # later, or not known
        assert main(["mark", str(tmp_path), "--submitted", submitted]) == 0
    assert (tmp_path / "STOP").exists()
    capsys.readouterr()
    assert main(["mark", str(tmp_path), "--submitted", "2026-03-01T12:00:00"]) == 75
    assert capsys.readouterr().out.startswith("not started: `keepstep stop` asked the run to stop")
    assert not (tmp_path / "STOP").exists()


def failed_run(folder, error, exit_code=1, saved=True):
    cluster = Cluster(folder, world_size=8).started(saved=20 if saved else None).fails(3, error, exit_code)
    return cluster.write()


def verdict(run, capsys, *, progress=True, code=1):
    (run / "checkpoints" / "step-00000020").mkdir(parents=True)
    mark = f"{START - 600}:{-1 if progress else 20}"
    assert main(["decide", str(run), "--mark", mark, "--launcher-code", str(code), "--limit", "3"]) == code
    return capsys.readouterr().out


def test_a_rule_forbids_an_attempt_that_would_fail_again(tmp_path, capsys):
    run = failed_run(tmp_path / "run", "runs/x/checkpoints cannot be written (Read-only file system); make it writable")
    assert verdict(run, capsys).startswith("not requeued: failed after progress: rank 3 on n000: the run folder")


def test_a_rule_names_the_cause_of_a_requeue(tmp_path, capsys):
    said = verdict(failed_run(tmp_path / "run", "memory ran out"), capsys)
    assert said.startswith("requeue: failed after progress: rank 3 on n000: the memory of the node ran out")


def test_a_cause_outside_of_the_run_permits_one_attempt_without_progress(tmp_path, capsys):
    run = failed_run(tmp_path / "run", "CUDA error: uncorrectable ECC error encountered", saved=False)
    assert verdict(run, capsys, progress=False).startswith("requeue: failed without progress: rank 3 on n000: a device")
    cluster = Cluster(tmp_path / "again", world_size=8).started(saved=None, at=START - 60).started(saved=None)
    run = cluster.fails(3, "CUDA error: uncorrectable ECC error encountered").write()
    assert verdict(run, capsys, progress=False).startswith("not requeued: failed without progress")


def test_an_error_without_a_rule_is_decided_by_progress_alone(tmp_path, capsys):
    for name, progress, said in (("a", True, "requeue: failed after"), ("b", False, "not requeued: failed without")):
        run = failed_run(tmp_path / name, "list index out of range", saved=progress)
        shown = verdict(run, capsys, progress=progress)
        assert shown.startswith(f"{said} progress: list index out of range")
        assert "rank 3" not in shown


def test_no_rule_changes_the_decision_after_a_failure_for_good(tmp_path, capsys):
    run = failed_run(tmp_path / "run", "CUDA error: uncorrectable ECC error encountered", exit_code=2)
    assert verdict(run, capsys, code=2).startswith("not requeued: failed for good")


def test_a_mistake_in_a_rule_leaves_the_decision_to_the_exit_code(tmp_path, capsys, monkeypatch):
    def break_down(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(after_failure, "diagnose", break_down)
    assert main(["decide", str(tmp_path), "--mark", "0:-1", "--launcher-code", "1", "--limit", "1"]) == 1
    assert "not requeued: failed without progress" in capsys.readouterr().out
