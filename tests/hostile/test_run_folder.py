"""A disk that is full, read-only or no folder at all gives one line and a documented exit code, not a traceback."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launch import cli
from tests.train.checkpoint.test_faults import may_mount
from train.exit_codes import FAILED, FAILED_FOR_GOOD

ROOT = Path(__file__).parents[2]
LAPTOP = ROOT / "recipes" / "laptop.yaml"
DATA = f"data.sources.0.path={ROOT}/tests/earlier_version/data"
mounting = pytest.mark.skipif(not may_mount(), reason="a file system cannot be mounted here; that needs root")

FULL = 'mount -t tmpfs -o size=16k tmpfs "$0" && head -c 16k /dev/zero >"$0/filler"; mkdir -p "$0/laptop"; exec "$@"'
READ_ONLY = 'mkdir -p "$0/laptop" && touch "$0/laptop/events.jsonl" && mount -t tmpfs -o ro tmpfs "$0" && exec "$@"'
OF_A_RUN = (
    'mount -t tmpfs tmpfs "$0" && mkdir "$0/laptop" && touch "$0/laptop/events.jsonl" && mount -o remount,ro "$0" '
    '&& exec "$@"'
)


def on_a_disk(mount: str, runs: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Keepstep in a namespace in which a small or read-only disk is mounted at `runs`."""
    runs.mkdir()
    sbatch = runs.parent / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 1\n")
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    env = os.environ | {
        "PATH": f"{sbatch.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    argv = ["unshare", "--mount", "sh", "-c", mount, str(runs), sys.executable, "-m", "launch.cli", *command]
    return subprocess.run(argv, env=env, cwd=runs.parent, capture_output=True, text=True, timeout=600)


def one_line(done: subprocess.CompletedProcess[str], code: int, message: str) -> None:
    assert "Traceback" not in done.stdout + done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("keepstep: ") and message in line]
    assert done.returncode == code


@mounting
@pytest.mark.parametrize(
    ("mount", "message"), [(FULL, "no space is left for"), (READ_ONLY, "cannot be written (Read-only file system)")]
)
@pytest.mark.parametrize("command", ["submit", "run"])
def test_a_run_or_a_job_that_cannot_be_written(tmp_path: Path, mount: str, message: str, command: str) -> None:
    runs = tmp_path / "runs"
    options = ["--max-restarts", "0"] if command == "run" else []
    done = on_a_disk(mount, runs, command, str(LAPTOP), DATA, f"runs_dir={runs}", *options)
    one_line(done, FAILED, message)


@mounting
def test_a_stop_that_cannot_be_written(tmp_path: Path) -> None:
    done = on_a_disk(OF_A_RUN, tmp_path / "runs", "stop", str(tmp_path / "runs" / "laptop"))
    one_line(done, FAILED, "cannot be written (Read-only file system)")


@pytest.mark.parametrize("command", [["submit"], ["run", "--max-restarts", "0"]])
@pytest.mark.parametrize("runs", ["file/below", "x" * 300])
def test_a_place_that_can_have_no_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: list[str], runs: str
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / runs
    assert cli.main([*command, str(LAPTOP), DATA, f"runs_dir={place}"]) == FAILED_FOR_GOOD
    told = capfd.readouterr()
    assert "Traceback" not in told.out + told.err
    assert f"the folder {place}/laptop" in told.err
    assert "cannot be made" in told.err
