"""`keepstep diagnose` shows cause, place, verdict and advice, and refuses what is no run."""

import json
from pathlib import Path

import pytest

from launch import cli
from tests.launch.diagnose.cluster import Cluster, falling


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    cluster = Cluster(tmp_path / "run", world_size=16)
    cluster.started().train(falling(60)).event("slow_rank", rank=9, host="n001", probe_seconds=0.1)
    return cluster.fails(3, "memory ran out (\x1b[31mstd::bad_alloc); lower train.micro_batch_size").write()


def test_the_verdict_is_readable(failed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", str(failed)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{failed}: failed"
    assert lines[1].startswith("  root cause: rank 3 on n000: the memory of the node ran out")
    assert lines[2] == "    | exit code 1: memory ran out (\ufffd[31mstd::bad_alloc); lower train.micro_batch_size"
    facts = {line[2:14].strip(): line[14:] for line in lines[3:]}
    assert facts["verdict"] == "restart (the same command resumes the run)"
    assert facts["what to do"].startswith("lower train.micro_batch_size")
    assert facts["also"] == "straggler: event slow_rank: rank 9, host n001, probe 0.1 s"
    assert facts["more"] == "docs/troubleshooting.md: While the run trains (rule memory)"


def test_the_verdict_is_one_object_for_programs(failed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", str(failed), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    place = found["rule"], found["rank"], found["node"], found["ranks"], found["action"]
    assert place == ("memory", 3, "n000", 1, "restart")
    assert [one["rule"] for one in found["also"]] == ["straggler"]


@pytest.mark.parametrize("make", [None, "foreign"])
def test_what_is_no_run_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: str | None
) -> None:
    folder = tmp_path / "folder"
    if make:
        folder.mkdir()
        (folder / "notes.txt").write_text("nothing of Keepstep")
    assert cli.main(["diagnose", str(folder)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"keepstep: {folder} is not a run folder")
    assert said.err.count("\n") == 1
    assert not said.out
