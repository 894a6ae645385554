"""A fixed set of faults, each at a rank, a step and a phase. `test_random.py` draws many more."""

from pathlib import Path

import pytest

from tests.chaos.harness import Run, fault
from train.exit_codes import FAILED_FOR_GOOD, FINISHED, STOPPED
from train.records.events import read_jsonl
from train.records.goodput import account

LAST = 12


@pytest.fixture(scope="module")
def killed(root: Path) -> Run:
    """One run that meets many faults, each of which makes torchrun start all ranks again."""
    run = Run(root, "killed", ("data.prefetch_batches=1",))  # else the thread is too far ahead to be missed at once
    faults = [
        fault("dead_data_thread", 1, 1, "data"),
        fault("kill_in_write", 0, 6, "save"),
        fault("kill", 1, 7, "forward"),
        fault("raise", 1, 8, "evaluate"),
        fault("truncated_shard", 0, 10, "data"),
    ]
    assert run.train(faults) == FINISHED, run.output
    assert run.struck() == set(range(len(faults)))
    return run


def test_killed_torn_and_failing_ranks_lose_nothing_but_time(killed: Run, undisturbed: Run) -> None:
    killed.assert_same_as(undisturbed)
    assert len(killed.events("started")) == 6
    [damaged] = killed.events("quarantined")
    assert damaged["step"] == 9


def test_every_second_from_the_first_start_to_the_end_is_booked_once_in_the_events(killed: Run) -> None:
    [finished], began = killed.events("finished"), killed.events("started")[0]
    wall = finished["time"] - began["time"] + began["uptime"]
    entries = [entry for kind in ("booked", "settled", "finished") for entry in killed.events(kind)]
    assert sum(sum(entry["seconds"].values()) for entry in entries) == pytest.approx(wall, rel=0.01)
    report = account(read_jsonl(killed.folder / "events.jsonl"), read_jsonl(killed.folder / "metrics.jsonl"))
    for kind, seconds in report.seconds.items():
        assert seconds > 0.0 or kind == "compile"
        told = sum(entry["seconds"].get(kind, 0.0) for entry in entries)
        assert told == pytest.approx(seconds, abs=0.01 * wall), kind


def test_the_failing_ranks_number_and_traceback_are_last_in_the_log_before_the_restart(killed: Run) -> None:
    before, _, _ = killed.output.partition("RuntimeError: a fault on purpose")
    last = before.split("keepstep: ")[-2:]
    assert last[0].startswith("rank 1 (pid "), killed.output
    assert "ended first, by exit code 1; starting all ranks again" in last[0]
    assert last[1].startswith("rank 1 failed:\n")
    [failed] = [event for event in killed.events("failed") if "a fault on purpose" in event["error"]]
    assert failed["rank"] == 1


def test_a_stop_of_one_worker_stops_all_on_one_step_with_one_checkpoint(root: Path, undisturbed: Run) -> None:
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


def test_a_stop_of_one_worker_as_the_run_starts_stops_all_before_the_first_step(root: Path) -> None:
    run = Run(root, "stopped-early")
    assert run.train([fault("term", 1, 0, "start")]) == STOPPED, run.output
    [stopped] = run.events("stopped")
    assert stopped["phase"] == "start"
    assert "stopped before the first step of this start (another rank was asked)" in run.output
    assert "Traceback" not in run.output
    assert not list(run.folder.glob("checkpoints/*"))


def test_a_rank_that_hangs_is_named_with_its_place_and_its_stack(root: Path, undisturbed: Run) -> None:
    run = Run(root, "hanging", ("train.hang_seconds=5",))
    assert run.train([fault("hang", 1, 5, "forward")]) == FINISHED, run.output
    assert run.losses() == undisturbed.losses()
    assert "rank 1 is the one that is late; phase forward, 5 steps done, in train.health.injected_faults:" in run.output
    assert "time.sleep(3600)" in run.output, "the late rank's stack"
    [hang] = run.events("hang")
    assert hang["rank"] == 1
    stacks = sorted(path.name for path in (run.folder / "logs").glob("stacks-*"))
    assert stacks == ["stacks-rank-0.txt", "stacks-rank-1.txt"]


@pytest.mark.slow
def test_a_rank_0_that_is_stopped_is_named_by_the_others(root: Path, undisturbed: Run) -> None:
    run = Run(root, "frozen", ("train.hang_seconds=5",))
    assert run.train([fault("freeze", 0, 7, "update")]) == FINISHED, run.output
    assert run.losses() == undisturbed.losses()
    assert "rank 1 (pid " in run.output, "the one that ended first, for rank 0 cannot speak"
    assert "it is stopped or cut off; all ranks leave" in run.output


def test_numbers_that_are_not_finite_never_reach_the_weights_and_a_flipped_bit_is_found(root: Path) -> None:
    run = Run(root, "numbers", ("parallel.engine=ddp",))
    faults = [fault("nan_gradient", 1, 2, "forward"), fault("flipped_weight", 1, 7, "data")]
    assert run.train(faults) == FINISHED, run.output
    [skipped] = run.events("skipped")
    assert (skipped["step"], skipped["data_step"], skipped["first_sample"]) == (2, 2, 8)
    assert "must be finite" in skipped["why"]
    assert "ranks 0, 1 hold copies of the same weights that differ" in run.output
    assert len(run.events("started")) == 2
    assert sorted(run.losses()) == list(range(1, LAST + 1))


def test_a_weight_that_flips_between_the_last_comparison_and_a_save_is_not_saved(root: Path) -> None:
    run = Run(root, "flipped", ("parallel.engine=ddp",))
    faults = [fault("term", 1, 6, "update"), fault("flipped_weight", 0, 7, "data")]
    assert run.train(faults) == FINISHED, run.output
    assert "ranks 0, 1 hold copies of the same weights that differ" in run.output
    assert run.struck() == {0, 1}
    assert [event["step"] for event in run.events("resumed")] == [6]


def test_a_second_run_in_the_folder_refuses_and_the_first_goes_on(root: Path) -> None:
    first = Run(root, "shared", ("train.steps=400", "train.eval_sequences=0", "checkpoint.every=400"))
    process = first.start()
    assert process.stdout is not None
    for line in process.stdout:
        if "step 2/" in line:
            break
    second = Run(root, "shared", first.overrides, ranks=1)
    command = second.start()
    refused, _ = command.communicate(timeout=60)
    (first.folder / "STOP").touch()
    output, _ = process.communicate(timeout=60)
    assert command.returncode == FAILED_FOR_GOOD, refused
    assert "is in use by process" in refused
    assert "Traceback" not in refused
    assert process.returncode == STOPPED, output
    assert not (first.folder / "STOP").exists()
    assert not (first.folder / "lease.json").exists()
