"""Processes that hold locks of a run, and containers that share its folder."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from data_pipeline.build.lock import build_lock
from data_pipeline.errors import DataError
from data_pipeline.file_lock import open_lock
from launch.supervise.rank_logs import RankLogs
from parallel.errors import LaunchError
from tests.slurm.machines import why_not
from train.health import lease as module
from train.health.lease import Holder, Lease

ROOT = Path(__file__).parents[2]


@contextmanager
def locked_by_another(file: Path) -> Iterator[int]:
    """Another process holds a lock on the file; gives its pid."""
    hold = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print('held', flush=True); input()"
    argv = [sys.executable, "-c", hold, str(file)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.kill()


def hold(path: Path) -> Lease:
    return Lease(path, Holder.this_process({}), lambda why: pytest.fail(why))


def test_only_their_owner_can_open_the_lock_files(tmp_path: Path) -> None:
    hold(tmp_path / "lease.json").release()
    RankLogs(tmp_path / "logs", terminal=False).close()
    with build_lock(tmp_path / "set"):
        files = [tmp_path / "lease.json.lock", tmp_path / "logs/.lock", *tmp_path.rglob("lock")]
        assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 3


def test_a_lock_file_of_an_earlier_version_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "lock").touch(0o644)
    os.close(open_lock(tmp_path / "lock"))
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_lock_that_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    match kind:
        case "link":
            path.symlink_to(tmp_path / "elsewhere")
        case "fifo":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with pytest.raises(OSError, match="lock"):
        open_lock(path)
    path.rename(tmp_path / "lease.json.lock")
    with pytest.raises(LaunchError, match=r"the lease cannot be locked: .*lease.json.lock.*; remove that file"):
        hold(tmp_path / "lease.json")
    assert not (tmp_path / "elsewhere").exists()


def test_a_start_does_not_wait_without_end_for_a_lock_and_names_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.2)
    (tmp_path / "lease.json.lock").touch()
    with (
        locked_by_another(tmp_path / "lease.json.lock") as pid,
        pytest.raises(LaunchError, match=f"lease.json.lock is locked by process {pid}, which has not released it"),
    ):
        hold(tmp_path / "lease.json")


def test_a_run_outlives_a_lock_on_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 0.2)
    lease = hold(tmp_path / "lease.json")
    with locked_by_another(tmp_path / "lease.json.lock") as pid:
        lease.release()
    assert f"is locked by process {pid}" in caplog.text
    hold(tmp_path / "lease.json").release()
    assert not (tmp_path / "lease.json").exists()


def test_a_build_names_the_process_that_holds_its_lock(tmp_path: Path) -> None:
    with build_lock(tmp_path / "set"):
        (lock,) = tmp_path.rglob("lock")
    with locked_by_another(lock) as pid, pytest.raises(DataError, match=f"; process {pid} holds its lock"):
        with build_lock(tmp_path / "set"):
            pass


HOLD = """
import sys, time
from pathlib import Path
from parallel.errors import LaunchError
from train.health.lease import Holder, Lease
try:
    Lease(Path(sys.argv[1]), Holder.this_process({}), lambda why: print("lost", why, flush=True))
    print("held", flush=True)
    time.sleep(3600)
except LaunchError as error:
    print(error, flush=True)
"""


@pytest.mark.skipif(bool(why_not()) and "CI" not in os.environ, reason=f"no namespaces here: {why_not()}")
def test_of_two_containers_on_one_host_only_one_runs_in_a_folder(tmp_path: Path) -> None:
    container = [shutil.which("unshare") or "unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
    argv = [*container, sys.executable, "-P", "-c", HOLD, str(tmp_path / "lease.json")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    said: list[str] = []
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            processes.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True))
            assert processes[-1].stdout
            said.append(processes[-1].stdout.readline())
        assert said[0] == "held\n"
        assert f"the run folder {tmp_path} is in use by process " in said[1]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()
