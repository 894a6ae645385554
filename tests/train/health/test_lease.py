import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from parallel.errors import LaunchError
from train.health import lease as module
from train.health.lease import Holder, Lease

ALIVE = Holder.this_process({})
ELSEWHERE = Holder("elsewhere", "another-host", 4711, 0.0, "")


@pytest.fixture(autouse=True)
def quick_renewal_and_no_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may delay a renewal for any time, so leases expire only where a test wants it."""
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 1e9)


def must_not_lose(why: str) -> None:
    raise AssertionError(why)


def write_lease(path: Path, holder: Holder, count: int = 0) -> None:
    partial = path.with_name("lease.partial")
    partial.write_text(json.dumps({"holder": vars(holder), "count": count}))
    partial.replace(path)


@contextmanager
def renewed_by(path: Path, holder: Holder) -> Iterator[None]:
    """A holder that increments the count until the block ends."""
    write_lease(path, holder)
    ended = threading.Event()

    def renew() -> None:
        count = 0
        while not ended.wait(0.05):
            count += 1
            write_lease(path, holder, count)

    thread = threading.Thread(target=renew)
    thread.start()
    yield
    ended.set()
    thread.join()


def holder_of(path: Path) -> str:
    return json.loads(path.read_text())["holder"]["id"]


def test_the_lease_of_a_free_folder_lasts_until_its_release(tmp_path: Path) -> None:
    me = Holder.this_process({})
    lease = Lease(tmp_path / "lease.json", me, must_not_lose)
    assert holder_of(tmp_path / "lease.json") == me.id
    lease.release()
    assert not (tmp_path / "lease.json").exists()


def test_a_second_run_is_refused_and_the_error_names_the_holder(tmp_path: Path) -> None:
    first = Lease(tmp_path / "lease.json", Holder.this_process({"SLURM_JOB_ID": "17"}), must_not_lose)
    with pytest.raises(LaunchError, match=rf"in use by process {os.getpid()} on .*, job 17; .*keepstep stop"):
        Lease(tmp_path / "lease.json", Holder.this_process({"SLURM_JOB_ID": "18"}), must_not_lose)
    first.release()


def test_the_lease_of_a_dead_process_on_this_host_is_taken_over_immediately(tmp_path: Path) -> None:
    with open("/proc/sys/kernel/pid_max") as file:  # noqa: PTH123
        no_such_process = int(file.read()) + 1
    write_lease(tmp_path / "lease.json", replace(ALIVE, id="dead", pid=no_such_process))
    Lease(tmp_path / "lease.json", Holder.this_process({}), must_not_lose).release()


def test_a_process_that_reuses_the_pid_of_a_dead_holder_is_not_the_holder(tmp_path: Path) -> None:
    write_lease(tmp_path / "lease.json", replace(ALIVE, id="dead", started=ALIVE.started - 60.0))
    Lease(tmp_path / "lease.json", Holder.this_process({}), must_not_lose).release()


@pytest.mark.parametrize(
    "place", [{"pid_namespace": "pid:[1]"}, {"boot": "another"}, {"boot": "", "pid_namespace": ""}]
)
def test_a_pid_of_another_container_or_machine_says_nothing_about_the_holder(
    tmp_path: Path, place: dict[str, str]
) -> None:
    holder = replace(ALIVE, id="unknown", started=ALIVE.started - 60.0, **place)
    with (
        renewed_by(tmp_path / "lease.json", holder),
        pytest.raises(LaunchError, match=f"in use by process {ALIVE.pid} on "),
    ):
        Lease(tmp_path / "lease.json", Holder.this_process({}), must_not_lose)


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"},
        {"SLURM_JOB_ID": "17", "TORCHELASTIC_RUN_ID": "job17.0", "TORCHELASTIC_RESTART_COUNT": "3"},
        {"TORCHELASTIC_RUN_ID": "17", "TORCHELASTIC_RESTART_COUNT": "3"},
    ],
)
def test_an_earlier_attempt_of_the_same_job_has_ended_even_on_another_host(tmp_path: Path, env: dict[str, str]) -> None:
    write_lease(tmp_path / "lease.json", Holder("before", "another-host", 1, 0.0, "17", requeues=0, restarts=2))
    Lease(tmp_path / "lease.json", Holder.this_process(env), must_not_lose).release()


def test_a_second_run_of_the_same_job_is_refused_while_the_first_is_alive(tmp_path: Path) -> None:
    env = {"SLURM_JOB_ID": "17", "TORCHELASTIC_RUN_ID": "job17.0"}
    first = Lease(tmp_path / "lease.json", Holder.this_process(env), must_not_lose)
    with pytest.raises(LaunchError, match=r"in use by process .*, job 17"):
        Lease(tmp_path / "lease.json", Holder.this_process(env | {"TORCHELASTIC_RESTART_COUNT": "1"}), must_not_lose)
    first.release()


def test_a_second_run_of_the_same_job_is_refused_while_the_first_is_alive_on_another_host(tmp_path: Path) -> None:
    first = Holder("first", "another-host", 4711, 0.0, "17")
    with (
        renewed_by(tmp_path / "lease.json", first),
        pytest.raises(LaunchError, match="in use by process 4711 on another-host, job 17"),
    ):
        Lease(tmp_path / "lease.json", Holder.this_process({"SLURM_JOB_ID": "17"}), must_not_lose)


def test_the_lease_of_a_holder_on_another_host_expires_without_renewals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 0.5)
    write_lease(tmp_path / "lease.json", ELSEWHERE, count=99)
    me = Holder.this_process({})
    lease = Lease(tmp_path / "lease.json", me, must_not_lose)
    assert holder_of(tmp_path / "lease.json") == me.id
    lease.release()


def test_a_holder_on_another_host_whose_count_increases_is_alive(tmp_path: Path) -> None:
    with (
        renewed_by(tmp_path / "lease.json", ELSEWHERE),
        pytest.raises(LaunchError, match="in use by process 4711 on another-host"),
    ):
        Lease(tmp_path / "lease.json", Holder.this_process({}), must_not_lose)


def test_a_truncated_lease_file_has_no_holder(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_text('{"holder": {"id": "x", "ho')
    Lease(tmp_path / "lease.json", Holder.this_process({}), must_not_lose).release()


@pytest.mark.parametrize("taker", [ELSEWHERE, None])
def test_a_holder_that_lost_its_lease_is_notified(tmp_path: Path, taker: Holder | None) -> None:
    path = tmp_path / "lease.json"
    reasons: list[str] = []
    notified = threading.Event()

    def on_loss(why: str) -> None:
        reasons.append(why)
        notified.set()

    lease = Lease(path, Holder.this_process({}), on_loss)
    with module._locked(path):  # no renewal may run meanwhile and write the file again
        if taker:
            write_lease(path, taker)
        else:
            path.unlink()
    assert notified.wait(60)
    assert "process 4711 on another-host" in reasons[0] if taker else "its file is gone" in reasons[0]
    lease.release()
    assert path.exists() == bool(taker)


def test_a_disk_that_is_full_for_a_short_time_does_not_lose_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease(tmp_path / "lease.json", Holder.this_process({}), must_not_lose)
    tried, renewed = threading.Event(), threading.Event()
    original_write = Lease._write

    def write(self: Lease) -> None:
        if not tried.is_set():
            tried.set()
            raise OSError(28, "No space left on device")
        original_write(self)
        renewed.set()

    monkeypatch.setattr(Lease, "_write", write)
    assert tried.wait(60)
    assert renewed.wait(60)
    lease.release()
