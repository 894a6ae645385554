"""A fixed set of faults, each at a rank, a step and a phase. `test_random.py` draws random ones."""

from pathlib import Path

import pytest

from tests.chaos.harness import LIMIT_SECONDS, Run, fault
from train.exit_codes import FAILED_FOR_GOOD, FINISHED, STOPPED
from train.records.goodput import account
from train.records.jsonl import read_jsonl

LAST = 12

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def killed(root: Path) -> Run:
    """One run with several faults, each of which makes torchrun restart all ranks.

    With more prefetched batches the loss of the thread would show only later. Saves in the background might not be
    complete when the last fault damages the newest checkpoint."""
    run = Run(root, "killed", ("data.prefetch_batches=1", "checkpoint.background=false"))
    faults = [
        fault("dead_data_thread", 1, 1, "data"),
        fault("kill_in_write", 0, 6, "save"),
        fault("kill", 1, 7, "forward"),
        fault("raise", 1, 8, "evaluate"),
        fault("truncated_shard", 0, 10, "data"),
    ]
    assert run.train(faults) == FINISHED, run.output
    assert run.injected() == set(range(len(faults)))
    return run


def test_a_run_with_killed_and_failing_ranks_has_the_same_result(killed: Run, undisturbed: Run) -> None:
    killed.assert_same_as(undisturbed)
    assert len(killed.events("started")) == 6
    [damaged] = killed.events("quarantined")
    assert damaged["step"] == 9


def test_every_second_from_the_first_start_to_the_end_is_accounted_for(killed: Run) -> None:
    [finished], began = killed.events("finished"), killed.events("started")[0]
    wall = finished["time"] - began["time"] + began["uptime"]
    report = account(read_jsonl(killed.folder / "events.jsonl"))
    assert report.total == pytest.approx(wall, rel=0.01)
    for kind, seconds in report.seconds.items():
        assert seconds > 0.0 or kind in ("compile", "profile")
    assert report.kept_steps == 12
    assert report.lost_steps > 0


def test_the_log_before_a_restart_ends_with_the_failed_rank_and_its_traceback(killed: Run) -> None:
    before, _, _ = killed.output.partition("RuntimeError: injected fault")
    last = before.split("keepstep: ")[-2:]
    assert last[0].startswith("rank 1 (pid "), killed.output
    assert "failed first (exit code 1); restarting all ranks" in last[0]
    assert last[1].startswith("rank 1 failed:\n")
    [failed] = [event for event in killed.events("failed") if "injected fault" in event["error"]]
    assert failed["rank"] == 1


def test_a_stop_signal_to_one_rank_stops_all_ranks_at_one_step_with_one_checkpoint(
    root: Path, undisturbed: Run
) -> None:
    run = Run(root, "stopped")
    faults = [fault("no_space", 0, 3, "save"), fault("term", 1, 4, "evaluate"), fault("usr1", 1, 4, "save")]
    assert run.train(faults) == STOPPED, run.output
    [failed] = run.events("save_failed")
    assert failed["step"] == 3
    assert "No space left on device" in failed["error"]
    [stopped] = run.events("stopped")
    assert stopped["step"] == 4
    assert [path.name for path in sorted((run.folder / "checkpoints").iterdir())] == ["step-00000004"]
    assert run.train() == FINISHED, run.output
    run.assert_same_as(undisturbed)


def test_a_stop_signal_to_one_rank_during_the_start_stops_all_before_the_first_step(root: Path) -> None:
    run = Run(root, "stopped-early")
    assert run.train([fault("term", 1, 0, "start")]) == STOPPED, run.output
    [stopped] = run.events("stopped")
    assert stopped["phase"] == "start"
    assert "stopped before the first step of this start (another rank was asked to stop)" in run.output
    assert "Traceback" not in run.output
    assert not list(run.folder.glob("checkpoints/*"))


def test_a_rank_that_hangs_is_named_with_its_location_and_its_stack(root: Path, undisturbed: Run) -> None:
    run = Run(root, "hanging", ("train.hang_seconds=60",))
    assert run.train([fault("hang", 1, 5, "forward")]) == FINISHED, run.output
    assert run.losses() == undisturbed.losses()
    assert "rank 1 is behind the others: phase forward, 5 steps done, in train.health.injected_faults:" in run.output
    assert "time.sleep(3600)" in run.output, "the stack of the rank that hangs"
    [hang] = run.events("hang")
    assert hang["rank"] == 1
    stacks = sorted(path.name for path in (run.folder / "logs").glob("stacks-*"))
    assert stacks == ["stacks-rank-0.txt", "stacks-rank-1.txt"]


@pytest.mark.slow
def test_the_other_ranks_name_a_rank_0_that_does_not_answer(root: Path, undisturbed: Run) -> None:
    run = Run(root, "frozen", ("train.hang_seconds=60",))
    assert run.train([fault("freeze", 0, 7, "update")]) == FINISHED, run.output
    assert run.losses() == undisturbed.losses()
    assert "rank 1 (pid " in run.output, "the rank that ended first; rank 0 is stopped and writes nothing"
    assert "stopped or unreachable; all ranks exit" in run.output


def test_a_gradient_that_is_not_finite_is_skipped_and_a_flipped_bit_is_detected(root: Path) -> None:
    run = Run(root, "numbers", ("parallel.engine=ddp",))
    faults = [fault("nan_gradient", 1, 2, "forward"), fault("flipped_weight", 1, 7, "data")]
    assert run.train(faults) == FINISHED, run.output
    [skipped] = run.events("skipped")
    assert (skipped["step"], skipped["data_step"], skipped["first_sample"]) == (2, 2, 8)
    assert "must be finite" in skipped["why"]
    assert "ranks 0, 1 hold different replicas of the same weights" in run.output
    assert len(run.events("started")) == 2
    assert sorted(run.losses()) == list(range(1, LAST + 1))


def test_a_bit_that_flips_between_the_last_comparison_and_a_save_is_not_saved(root: Path) -> None:
    run = Run(root, "flipped", ("parallel.engine=ddp",))
    faults = [fault("term", 1, 6, "update"), fault("flipped_weight", 0, 7, "save")]
    assert run.train(faults) == FINISHED, run.output
    assert "ranks 0, 1 hold different replicas of the same weights" in run.output
    assert run.injected() == {0, 1}
    assert [event["step"] for event in run.events("resumed")] == [6]


def test_a_second_run_in_the_folder_is_refused_and_the_first_continues(root: Path) -> None:
    """The first run has more steps than it can finish before the second one starts, and few lines of log."""
    never = 10**7
    settings = (f"train.steps={never}", f"checkpoint.every={never}", f"train.log_every={never}")
    first = Run(root, "shared", (*settings, "train.eval_sequences=0"))
    process = first.start()
    assert process.stdout is not None
    for line in process.stdout:
        if "step 1/" in line:
            break
    second = Run(root, "shared", first.overrides, ranks=1)
    command = second.start()
    refused, _ = command.communicate(timeout=LIMIT_SECONDS)
    (first.folder / "STOP").touch()
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert command.returncode == FAILED_FOR_GOOD, refused
    assert "is in use by process" in refused
    assert "Traceback" not in refused
    assert process.returncode == STOPPED, output
    assert not (first.folder / "STOP").exists()
    assert not (first.folder / "lease.json").exists()
