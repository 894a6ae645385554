"""Profiles of real runs: in this process, and of two ranks."""

import gzip
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch import cli
from tests.chaos.harness import build_data
from tests.train.test_loop import ROOT, STEPS, Job
from train.exit_codes import FAILED_FOR_GOOD, FINISHED
from train.profiling import profiler as profiler_module
from train.profiling.config import MOST_STEPS, ProfileConfig
from train.profiling.request import ProfileRequest
from train.records.jsonl import read_jsonl
from train.run import Run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_data(tmp_path_factory.mktemp("profiled"))


def with_profile(job: Job, at: int, steps: int = 3) -> Job:
    train = job.recipe.train.model_copy(update={"profile": ProfileConfig(at=at, steps=steps), "sinks": ()})
    job.recipe = job.recipe.model_copy(update={"train": train})
    return job


def profiles(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "profiles").iterdir()) if (folder / "profiles").exists() else []


def read_trace(file: Path) -> list[dict[str, Any]]:
    """Returns the events of a trace, which has the form that Perfetto reads: gzip, JSON, `traceEvents`."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert all(event["ph"] != "X" or {"name", "pid", "tid", "ts", "dur"} <= event.keys() for event in events)
    return events


def steps_in(events: list[dict[str, Any]]) -> list[str]:
    found = [event for event in events if event["name"].startswith("step ") and event["ph"] == "X"]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


def rank_in(events: list[dict[str, Any]]) -> set[str]:
    """Returns the names of the processes: Perfetto takes the last name of a process."""
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return {named[event["pid"]] for event in events if event["name"].startswith("step ")}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Job, Job, str]:
    """A run without a profile, the same run with one of steps 5 to 7, and the log of the second."""
    root = tmp_path_factory.mktemp("runs")
    plain, job = with_profile(Job(root, data, "plain"), at=0), with_profile(Job(root, data, "profiled"), at=5)
    with pytest.MonkeyPatch.context() as patch:
        assert plain.train(patch) == FINISHED
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logger = logging.getLogger("train.profiling")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        assert job.train(patch) == FINISHED
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return plain, job, "\n".join(lines)


def test_a_profile_changes_no_bit_of_the_run(profiled: tuple[Job, Job, str]) -> None:
    plain, job, _ = profiled
    assert profiles(plain.folder) == []
    assert not plain.events("profiled")
    assert job.losses() == plain.losses()
    assert job.differs_from(plain) == []


def test_the_trace_has_the_steps_of_the_recipe_by_name(profiled: tuple[Job, Job, str]) -> None:
    job = profiled[1]
    assert profiles(job.folder) == ["step-00000005"]
    assert [path.name for path in (job.folder / "profiles" / "step-00000005").iterdir()] == ["rank-0.json.gz"]
    events = read_trace(job.folder / "profiles" / "step-00000005" / "rank-0.json.gz")
    assert steps_in(events) == ["step 5", "step 6", "step 7"]
    assert rank_in(events) == {"rank 0"}
    assert {"phase data", "phase forward", "phase update"} <= {event["name"] for event in events}


def test_the_event_and_the_log_name_shares_and_costs(profiled: tuple[Job, Job, str]) -> None:
    _, job, log = profiled
    (event,) = job.events("profiled")
    assert (event["step"], event["steps"]) == (5, 3)
    assert sum(event["shares"].values()) == pytest.approx(1, abs=1e-3)
    assert event["shares"].keys() == {"compute", "communication", "data", "host", "bubble"}
    assert event["shares"]["compute"] > 0
    assert event["shares"]["bubble"] == 0
    assert len(event["costs"]) == 10
    assert [cost["seconds"] for cost in event["costs"]] == sorted((c["seconds"] for c in event["costs"]), reverse=True)
    assert any(cost["name"].startswith("aten::") for cost in event["costs"])
    assert "profile of 3 steps from step 5" in log
    assert f"largest costs: {event['costs'][0]['name']} " in log
    assert "https://ui.perfetto.dev" in log


def test_the_time_of_a_profile_counts_as_its_own_kind(profiled: tuple[Job, Job, str]) -> None:
    plain, job, _ = profiled
    assert job.account().seconds["profile"] > 0
    assert plain.account().seconds["profile"] == 0


def test_a_live_run_profiles_the_steps_after_a_request(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = with_profile(Job(tmp_path, data), at=0)

    def ask(run: Run, data_step: int) -> None:
        if data_step == 4:  # while step 5 is computed
            assert cli.main(["profile", str(job.folder), "--steps", "2"]) == 0

    assert job.train(monkeypatch, ask) == FINISHED
    assert f"asked {job.folder} to profile 2 steps" in capsys.readouterr().out
    events = read_trace(job.folder / "profiles" / "step-00000006" / "rank-0.json.gz")
    assert steps_in(events) == ["step 6", "step 7"]
    assert profiles(job.folder) == ["step-00000006"], "the request is met once"
    assert not (job.folder / "PROFILE").exists()


def test_a_profile_ends_with_the_run(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = with_profile(Job(tmp_path, data), at=STEPS - 1, steps=10)
    assert job.train(monkeypatch) == FINISHED
    events = read_trace(job.folder / "profiles" / f"step-{STEPS - 1:08d}" / "rank-0.json.gz")
    assert steps_in(events) == [f"step {STEPS - 1}", f"step {STEPS}"]


def test_a_full_disk_loses_the_profile_and_not_the_run(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(profiler_module, "write_atomic", no_space)
    job = with_profile(Job(tmp_path, data), at=2)
    assert job.train(monkeypatch) == FINISHED
    assert "the profile from step 2 was not written" in caplog.text
    assert list((job.folder / "profiles" / "step-00000002").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"0", b"1001", b"three", b"9" * 100])
def test_a_foreign_request_is_removed(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "PROFILE").write_bytes(content)
    request = ProfileRequest(tmp_path / "PROFILE")
    assert request.steps() == 0
    assert not (tmp_path / "PROFILE").exists()
    assert f"does not hold a number from 1 to {MOST_STEPS}" in caplog.text


def test_a_request_that_is_a_folder_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "PROFILE").mkdir()
    request = ProfileRequest(tmp_path / "PROFILE")
    assert [request.steps(), request.steps()] == [0, 0]
    assert len(caplog.records) == 1


def test_two_ranks_profile_the_same_steps(tmp_path: Path, data: Path) -> None:
    """They find a request as they start, and the recipe names a later step."""
    job = with_profile(Job(tmp_path, data, "two"), at=4, steps=2)
    job.folder.mkdir()
    ProfileRequest(job.folder / "PROFILE").leave(1)
    recipe = tmp_path / "recipe.json"
    content = job.recipe.model_dump(mode="json")
    content["parallel"] |= {"engine": "ddp"}
    content["train"] |= {"steps": 6, "eval_sequences": 0}
    recipe.write_text(json.dumps(content))
    command = [sys.executable, "-m", "launch.cli", "run", str(recipe), "--ranks", "2", "--max-restarts", "0"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert profiles(job.folder) == ["step-00000001", "step-00000004"]
    for rank in (0, 1):
        for first, steps in ((1, ["step 1"]), (4, ["step 4", "step 5"])):
            events = read_trace(job.folder / "profiles" / f"step-{first:08d}" / f"rank-{rank}.json.gz")
            assert steps_in(events) == steps
            assert rank_in(events) == {f"rank {rank}"}
            assert any(event["name"].startswith("gloo:") for event in events)
    written = [event for event in read_jsonl(job.folder / "events.jsonl") if event["kind"] == "profiled"]
    assert [(event["step"], event["steps"]) for event in written] == [(1, 1), (4, 2)]
    assert all(event["shares"]["communication"] > 0 for event in written)


def test_a_run_that_has_ended_is_not_asked(profiled: tuple[Job, Job, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = profiled[0].folder
    assert cli.main(["profile", str(folder)]) == FAILED_FOR_GOOD
    assert capsys.readouterr().err == (
        f"keepstep: {folder} is not running (it is finished), so it has no steps to profile; set train.profile.at to "
        "profile a run that is started later\n"
    )
    assert not (folder / "PROFILE").exists()
    assert cli.main(["profile", str(folder), "--steps", "0"]) == FAILED_FOR_GOOD
    assert "--steps (0) must be at least 1" in capsys.readouterr().err
