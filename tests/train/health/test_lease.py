import json
import os
import threading
from pathlib import Path

import pytest

from parallel.errors import LaunchError
from train.health import lease as module
from train.health.lease import Holder, Lease

ALIVE = Holder.myself({})
ELSEWHERE = Holder("elsewhere", "another-host", 4711, 0.0, "")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 1.5)


def never(why: str) -> None:
    raise AssertionError(why)


def held_by(path: Path, holder: Holder, count: int = 0) -> None:
    path.write_text(json.dumps({"holder": vars(holder), "count": count}))


def holder_of(path: Path) -> str:
    return json.loads(path.read_text())["holder"]["id"]


def test_a_free_folder_is_held_until_the_release(tmp_path: Path) -> None:
    me = Holder.myself({})
    lease = Lease(tmp_path / "lease.json", me, never)
    assert holder_of(tmp_path / "lease.json") == me.id
    lease.release()
    assert not (tmp_path / "lease.json").exists()


def test_a_second_run_refuses_and_says_who_holds_the_folder(tmp_path: Path) -> None:
    first = Lease(tmp_path / "lease.json", Holder.myself({"SLURM_JOB_ID": "17"}), never)
    with pytest.raises(LaunchError, match=rf"in use by process {os.getpid()} on .*, job 17; .*keepstep stop"):
        Lease(tmp_path / "lease.json", Holder.myself({"SLURM_JOB_ID": "18"}), never)
    first.release()


def test_the_lease_of_a_dead_process_of_this_host_is_taken_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 1e9)
    with open("/proc/sys/kernel/pid_max") as file:  # noqa: PTH123
        no_such_process = int(file.read()) + 1
    held_by(tmp_path / "lease.json", Holder("dead", ALIVE.host, no_such_process, ALIVE.started, ""))
    Lease(tmp_path / "lease.json", Holder.myself({}), never).release()


def test_a_process_that_got_a_dead_holders_number_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 1e9)
    held_by(tmp_path / "lease.json", Holder("dead", ALIVE.host, ALIVE.pid, ALIVE.started - 60.0, ""))
    Lease(tmp_path / "lease.json", Holder.myself({}), never).release()


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"},
        {"SLURM_JOB_ID": "17", "TORCHELASTIC_RUN_ID": "job17.0", "TORCHELASTIC_RESTART_COUNT": "3"},
        {"TORCHELASTIC_RUN_ID": "17", "TORCHELASTIC_RESTART_COUNT": "3"},
    ],
)
def test_an_earlier_attempt_of_the_same_job_is_gone_even_if_it_ran_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str]
) -> None:
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 1e9)
    held_by(tmp_path / "lease.json", Holder("before", "another-host", 1, 0.0, "17", requeues=0, restarts=2))
    Lease(tmp_path / "lease.json", Holder.myself(env), never).release()


def test_a_second_run_of_the_same_job_refuses_while_the_first_lives(tmp_path: Path) -> None:
    env = {"SLURM_JOB_ID": "17", "TORCHELASTIC_RUN_ID": "job17.0"}
    first = Lease(tmp_path / "lease.json", Holder.myself(env), never)
    with pytest.raises(LaunchError, match=r"in use by process .*, job 17"):
        Lease(tmp_path / "lease.json", Holder.myself(env | {"TORCHELASTIC_RESTART_COUNT": "1"}), never)
    first.release()


def test_a_second_run_of_the_same_job_refuses_while_the_first_lives_on_another_host(tmp_path: Path) -> None:
    path, other = tmp_path / "lease.json", Holder("first", "another-host", 4711, 0.0, "17")
    held_by(path, other, count=1)
    mover = threading.Timer(0.2, held_by, (path, other, 2))
    mover.start()
    with pytest.raises(LaunchError, match="in use by process 4711 on another-host, job 17"):
        Lease(path, Holder.myself({"SLURM_JOB_ID": "17"}), never)
    mover.join()


def test_the_lease_of_a_silent_holder_elsewhere_expires(tmp_path: Path) -> None:
    held_by(tmp_path / "lease.json", ELSEWHERE, count=99)
    me = Holder.myself({})
    lease = Lease(tmp_path / "lease.json", me, never)
    assert holder_of(tmp_path / "lease.json") == me.id
    lease.release()


def test_a_holder_elsewhere_whose_count_moves_is_alive(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    held_by(path, ELSEWHERE, count=1)
    mover = threading.Timer(0.2, held_by, (path, ELSEWHERE, 2))
    mover.start()
    with pytest.raises(LaunchError, match="in use by process 4711 on another-host"):
        Lease(path, Holder.myself({}), never)
    mover.join()


def test_a_torn_lease_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_text('{"holder": {"id": "x", "ho')
    Lease(tmp_path / "lease.json", Holder.myself({}), never).release()


@pytest.mark.parametrize("taker", [ELSEWHERE, None])
def test_a_holder_that_lost_its_lease_is_told(tmp_path: Path, taker: Holder | None) -> None:
    path = tmp_path / "lease.json"
    told: list[str] = []
    heard = threading.Event()

    def on_loss(why: str) -> None:
        told.append(why)
        heard.set()

    lease = Lease(path, Holder.myself({}), on_loss)
    if taker:
        held_by(path, taker)
    else:
        path.unlink()
    assert heard.wait(10)
    assert "process 4711 on another-host" in told[0] if taker else "its file is gone" in told[0]
    lease.release()
    assert path.exists() == bool(taker)


def test_a_disk_that_is_full_for_a_while_does_not_lose_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease(tmp_path / "lease.json", Holder.myself({}), never)
    tried, renewed = threading.Event(), threading.Event()
    true_write = Lease._write

    def write(self: Lease) -> None:
        if not tried.is_set():
            tried.set()
            raise OSError(28, "No space left on device")
        true_write(self)
        renewed.set()

    monkeypatch.setattr(Lease, "_write", write)
    assert tried.wait(10)
    assert renewed.wait(10)
    lease.release()
