"""When a job is requeued, and when it must not be."""

import json
from datetime import datetime

import pytest

from launch.supervise.requeue import Attempt, decide, ending, main, saved_step


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
