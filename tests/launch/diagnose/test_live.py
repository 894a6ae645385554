"""Real ranks fail, and the launcher, the command and the requeue decision name the same cause."""

import json
from pathlib import Path

import pytest

from launch import cli
from launch.supervise import requeue
from tests.chaos.harness import Run, build_data
from tests.launch.diagnose.record import CASES
from train.exit_codes import FAILED


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("live")
    build_data(root)
    return root


def fail(root: Path, name: str) -> Run:
    case = CASES[name]
    run = Run(root, name, case.overrides, case.ranks)
    assert run.train(list(case.faults), max_restarts=0) == FAILED, run.output
    return run


def test_a_killed_rank_is_named_at_the_end_of_the_job(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = fail(root, "killed")
    [line] = [line for line in run.output.splitlines() if line.startswith("keepstep: root cause: ")]
    assert line.startswith("keepstep: root cause: rank 1 on ")
    assert "was killed by SIGKILL" in line
    assert "; restart: the same command resumes the run; " in line
    assert cli.main(["diagnose", str(run.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rule"], found["rank"], found["action"]) == ("killed", 1, "restart")
    mark = f"{run.events('started')[0]['time'] - 60}:-1"
    assert requeue.main(["decide", str(run.folder), "--mark", mark, "--launcher-code", "1", "--limit", "3"]) == FAILED
    assert capsys.readouterr().out.startswith("requeue: failed after progress: rank 1 on ")


def test_an_error_that_no_rule_knows_is_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = fail(root, "unknown-error")
    assert cli.main(["diagnose", str(run.folder)]) == 0
    shown = capsys.readouterr().out
    assert "root cause: rank 1 on " in shown
    assert "| RuntimeError: injected fault" in shown
