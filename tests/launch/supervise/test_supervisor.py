"""Real torchrun with a toy trainer: whatever happens, the sum is right, the exit code tells, and no process is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.supervise.supervisor import left_over

RUN = Path(__file__).with_name("toy_run.py")


class Toy:
    """A running toy with two ranks."""

    def __init__(self, folder: Path, steps: int, *faults: str) -> None:
        self.folder = folder
        argv = [sys.executable, str(RUN), "2", str(folder), str(steps), *faults]
        with (folder / "out").open("wb") as out:
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=env)

    def output(self) -> str:
        return (self.folder / "out").read_text()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def end(self) -> int:
        return self.process.wait(timeout=60)

    def saved(self) -> tuple[int, int]:
        total, step = (self.folder / "saved").read_text().split()
        return int(total), int(step)

    def ranks(self, attempt: int = -1) -> list[int]:
        return [int((self.folder / f"pids-{rank}").read_text().split()[attempt]) for rank in range(2)]

    def alive(self) -> list[int]:
        pids = [int(pid) for rank in range(2) for pid in (self.folder / f"pids-{rank}").read_text().split()]
        return [pid for pid in pids if psutil.pid_exists(pid)]


def after(steps: int) -> tuple[int, int]:
    """What an undisturbed run of two ranks saves."""
    return sum(2 * step + 1 for step in range(steps)), steps


def test_a_killed_rank_is_started_again_and_the_sum_is_that_of_an_undisturbed_run(tmp_path):
    toy = Toy(tmp_path, 12, "1@7:kill")
    assert toy.end() == 0, toy.output()
    assert toy.saved() == after(12)
    assert "rank 1 (pid " in toy.output()
    assert "ended first, by signal SIGKILL; starting all ranks again (2 restarts left)" in toy.output()
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
    assert toy.saved()[1] < 20


def test_a_failure_for_good_is_not_tried_again_and_shows_the_guilty_ranks_words(tmp_path):
    toy = Toy(tmp_path, 12, "1@3:2")
    assert toy.end() == 2, toy.output()
    assert "  rank 1 | rank 1 cannot go on at step 3" in toy.output()
    assert "giving up" in toy.output()
    assert len((tmp_path / "pids-0").read_text().split()) == 1


@pytest.mark.parametrize("victim", ["torchrun", "supervisor"])
def test_killing_a_launcher_leaves_no_rank_behind(tmp_path, victim):
    toy = Toy(tmp_path, 10_000)
    toy.wait_for("step 3 ")
    agent = psutil.Process(toy.process.pid).children()[0]
    (agent if victim == "torchrun" else psutil.Process(toy.process.pid)).kill()
    assert toy.end() == (1 if victim == "torchrun" else -signal.SIGKILL)
    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in toy.alive()], timeout=10)
    assert alive == [], gone
    if victim == "torchrun":
        assert "torchrun was killed by SIGKILL; its ranks too" in toy.output()


def sleeper(tmp_path: Path, **env: str) -> psutil.Process:
    """A process that looks like one of the run's, adopted by init."""
    code = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "KEEPSTEP"))}
    result = subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, check=True)
    return psutil.Process(int(result.stdout))


def test_only_this_runs_own_left_over_processes_are_found(tmp_path):
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    orphan = sleeper(tmp_path, KEEPSTEP_RUN=run, RANK="1")
    earlier = sleeper(tmp_path, KEEPSTEP_RUN=run, SLURM_JOB_ID="7")
    others = [
        sleeper(tmp_path, KEEPSTEP_RUN=other, RANK="1"),
        sleeper(tmp_path, KEEPSTEP_RUN=run, SLURM_JOB_ID="8"),
        sleeper(tmp_path, KEEPSTEP_RUN=run, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="2"),
    ]
    try:
        found = left_over(run, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"})
        assert {process.pid for process in found} == {orphan.pid, earlier.pid}
    finally:
        for process in (orphan, earlier, *others):
            process.kill()
