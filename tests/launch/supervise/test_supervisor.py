"""Real torchrun with a toy trainer: after any event the sum and the exit code are right and no process is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.supervise.supervisor import leftover_processes

RUN = Path(__file__).with_name("toy_run.py")
LIMIT_SECONDS = 600
"""Longest wait for anything, even on a busy machine."""


class Toy:
    """A running toy trainer with two ranks."""

    def __init__(self, folder: Path, steps: int, *faults: str) -> None:
        self.folder = folder
        argv = [sys.executable, str(RUN), "2", str(folder), str(steps), *faults]
        with (folder / "out").open("wb") as out:
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=env)

    def output(self) -> str:
        return (self.folder / "out").read_text()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while text not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def end(self) -> int:
        return self.process.wait(timeout=LIMIT_SECONDS)

    def saved(self) -> tuple[int, int]:
        total, step = (self.folder / "saved").read_text().split()
        return int(total), int(step)

    def ranks(self, attempt: int = -1) -> list[int]:
        return [int((self.folder / f"pids-{rank}").read_text().split()[attempt]) for rank in range(2)]

    def alive(self) -> list[int]:
        pids = [int(pid) for rank in range(2) for pid in (self.folder / f"pids-{rank}").read_text().split()]
        return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    """Whether a process runs. A zombie has ended; its parent, which may be a careless init, has not noticed."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def after(steps: int) -> tuple[int, int]:
    """Return what an undisturbed run of two ranks saves: the sum and the steps."""
    return sum(2 * step + 1 for step in range(steps)), steps


def test_after_a_killed_rank_all_ranks_restart_and_the_sum_is_that_of_an_undisturbed_run(tmp_path):
    toy = Toy(tmp_path, 12, "1@7:kill")
    assert toy.end() == 0, toy.output()
    assert toy.saved() == after(12)
    assert "rank 1 (pid " in toy.output()
    assert "failed first (signal SIGKILL); restarting all ranks (2 restarts left)" in toy.output()
    logs = list((tmp_path / "toy/logs").glob("*/rank-?.log"))
    assert [log.read_text().count("=== ") for log in logs] == [2, 2]
    assert toy.alive() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_stop_signal_ends_in_one_checkpoint_and_75_without_a_restart(tmp_path, number):
    toy = Toy(tmp_path, 10_000)
    toy.wait_for("step 3 ")
    toy.process.send_signal(number)
    assert toy.end() == 75, toy.output()
    total, step = toy.saved()
    assert (total, step) == after(step)
    assert len((tmp_path / "pids-0").read_text().split()) == 1
    assert toy.alive() == []


def test_a_signal_while_ranks_start_is_not_lost(tmp_path):
    toy = Toy(tmp_path, 10_000)
    while not psutil.Process(toy.process.pid).children():
        time.sleep(0.05)
    toy.process.send_signal(signal.SIGUSR1)
    assert toy.end() == 75, toy.output()
    assert toy.saved()[1] < 10_000


def test_a_failure_for_good_is_not_retried_and_shows_the_log_of_the_failed_rank(tmp_path):
    toy = Toy(tmp_path, 12, "1@3:2")
    assert toy.end() == 2, toy.output()
    assert "  rank 1 | rank 1 cannot continue at step 3" in toy.output()
    assert "giving up" in toy.output()
    assert len((tmp_path / "pids-0").read_text().split()) == 1


@pytest.mark.parametrize("victim", ["torchrun", "supervisor"])
def test_killing_a_launcher_leaves_no_rank_behind(tmp_path, victim):
    toy = Toy(tmp_path, 10_000)
    toy.wait_for("step 3 ")
    agent = psutil.Process(toy.process.pid).children()[0]
    (agent if victim == "torchrun" else psutil.Process(toy.process.pid)).kill()
    assert toy.end() == (1 if victim == "torchrun" else -signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_SECONDS
    while toy.alive():
        assert time.monotonic() < deadline, toy.output()
        time.sleep(0.05)
    if victim == "torchrun":
        assert "torchrun was killed by SIGKILL; its ranks were killed too" in toy.output()


def sleeper(tmp_path: Path, **env: str) -> psutil.Process:
    """Start a process that has the environment of a rank and was adopted by init."""
    code = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "KEEPSTEP"))}
    result = subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, check=True)
    return psutil.Process(int(result.stdout))


def test_only_leftover_processes_of_this_run_are_found(tmp_path):
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    orphan = sleeper(tmp_path, KEEPSTEP_RUN=run, RANK="1")
    earlier = sleeper(tmp_path, KEEPSTEP_RUN=run, SLURM_JOB_ID="7")
    others = [
        sleeper(tmp_path, KEEPSTEP_RUN=other, RANK="1"),
        sleeper(tmp_path, KEEPSTEP_RUN=run, SLURM_JOB_ID="8"),
        sleeper(tmp_path, KEEPSTEP_RUN=run, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="2"),
    ]
    try:
        found = leftover_processes(run, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"})
        assert {process.pid for process in found} == {orphan.pid, earlier.pid}
    finally:
        for process in (orphan, earlier, *others):
            process.kill()
