"""Drills: faults of a cluster, after which a run must have the losses and weights of a run without faults.

A drill submits a real job of two nodes, waits for a step, causes its fault, and returns once the run has finished.
`python -m tests.slurm.drills [NAME ...]` runs each drill on a new cluster and prints a table.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.slurm.cluster import Cluster
from tests.slurm.lab import HEADER, Job, Lab, Row
from tests.slurm.machines import until


def disturb(lab: Lab, name: str, event: str, act: Callable[[Job], float | None], *options: str) -> Row:
    """Submit a job, wait for a step, cause the fault with `act`, and compare the result.

    `act` returns when Slurm noticed the fault, or None. The row says what the fault cost."""
    job = Job(lab, name).submit(*options)
    job.wait_step(12)
    moment = time.time()
    noticed = act(job)
    return job.after(event, moment, noticed)


def _when_down(lab: Lab, node: str) -> float:
    until(
        lambda: lab.cluster.states()[node].startswith("down"), 300, f"Slurm to report {node} as down", pause_seconds=0.2
    )
    return time.time()


def _when_requeued(job: Job) -> None:
    until(lambda: int(job.show().get("Restarts", "0")) > 0, 300, "the requeue", pause_seconds=0.2)


def _signal(lab: Lab, name: str) -> Row:
    def act(job: Job) -> None:
        lab.cluster.slurm("scancel", "-s", name, job.id)

    return disturb(lab, name.lower(), f"`scancel -s {name}`", act)


def stop_signal(lab: Lab) -> Row:
    return _signal(lab, "USR2")


def other_stop_signal(lab: Lab) -> Row:
    return _signal(lab, "USR1")


def rank_killed(lab: Lab) -> Row:
    return disturb(lab, "kill-rank", "kill -9 of a rank", lambda job: os.kill(job.ranks()[1], signal.SIGKILL))


def _torchrun_killed(lab: Lab, node: int, where: str) -> Row:
    def act(job: Job) -> None:
        os.kill(job.agents()[node], signal.SIGKILL)

    return disturb(lab, f"kill-torchrun-{node}", f"kill -9 of torchrun on {where}", act)


def torchrun_killed_on_head(lab: Lab) -> Row:
    return _torchrun_killed(lab, 0, "the head node")


def torchrun_killed_on_worker(lab: Lab) -> Row:
    return _torchrun_killed(lab, 1, "a worker")


def _powered_off(lab: Lab, name: str, event: str, which: Callable[[Job], str]) -> Row:
    def act(job: Job) -> float:
        node = which(job)
        lab.cluster.power_off(node)
        return _when_down(lab, node)

    return disturb(lab, name, event, act)


def worker_powered_off(lab: Lab) -> Row:
    return _powered_off(lab, "off-worker", "power-off of a worker", Job.worker_node)


def head_powered_off(lab: Lab) -> Row:
    return _powered_off(lab, "off-head", "power-off of the head node", Job.head_node)


def network_cut(lab: Lab) -> Row:
    """Cut the network until Slurm has given up the node. In the end its old processes must be gone."""

    def act(job: Job) -> float:
        node = job.worker_node()
        lab.cluster.cut(node)
        noticed = _when_down(lab, node)
        _when_requeued(job)
        lab.cluster.reconnect(node)
        return noticed

    return disturb(lab, "cut", "network of a worker cut, restored after the requeue", act)


def network_cut_for_4_seconds(lab: Lab) -> Row:
    def act(job: Job) -> None:
        node = job.worker_node()
        lab.cluster.cut(node)
        time.sleep(4)
        lab.cluster.reconnect(node)

    return disturb(lab, "blip", "network of a worker cut, restored after 4 s", act)


def slurmd_killed_and_restarted(lab: Lab) -> Row:
    def act(job: Job) -> None:
        node = job.worker_node()
        lab.cluster.kill_daemon(node)
        time.sleep(2)
        lab.cluster.start_daemon(node)

    return disturb(lab, "slurmd", "slurmd killed, restarted after 2 s", act)


def slurmd_killed_for_good(lab: Lab) -> Row:
    """Slurm gives up a node whose ranks are alive. Without the other ranks they must end by themselves."""

    def act(job: Job) -> float:
        node = job.worker_node()
        with job.ranks_stopped():
            lab.cluster.kill_daemon(node)
            return _when_down(lab, node)

    return disturb(lab, "slurmd-gone", "slurmd killed for good", act)


def node_set_down(lab: Lab) -> Row:
    def act(job: Job) -> None:
        lab.cluster.slurm("scontrol", "update", f"NodeName={job.worker_node()}", "State=DOWN", "Reason=drill")

    return disturb(lab, "state-down", "`scontrol update State=DOWN`", act)


def controller_restarted(lab: Lab) -> Row:
    def act(job: Job) -> None:
        lab.cluster.kill_daemon("ctl")
        time.sleep(2)
        lab.cluster.start_daemon("ctl")
        until(job.show, 120, "the controller to answer", pause_seconds=0.2)

    return disturb(lab, "slurmctld", "slurmctld killed, restarted after 2 s", act)


def _time_limit(lab: Lab, name: str, event: str, number: str, warned: bool) -> Row:
    """The ranks are stopped until the signal comes, so that the run does not finish before it."""
    job = Job(lab, name).submit(sbatch=("--time=10",), warned=warned)
    job.wait_step(12)
    lab.cluster.slurm("scontrol", "update", f"JobId={job.id}", "TimeLimit=1")
    with job.ranks_stopped():
        until(lambda: f"{number}: asking the ranks" in job.log(), 300, f"{number} at the time limit")
        moment = time.time()
        lab.cluster.slurm("scontrol", "update", f"JobId={job.id}", "TimeLimit=10")  # for the next attempts
    return job.after(event, moment)


def time_limit(lab: Lab) -> Row:
    return _time_limit(lab, "time-limit", "time limit, warned by USR2", "SIGUSR2", warned=True)


def time_limit_without_warning(lab: Lab) -> Row:
    return _time_limit(lab, "time-limit-term", "time limit without a warning", "SIGTERM", warned=False)


def _preempt(lab: Lab, name: str, event: str, partition: str) -> Row:
    job = Job(lab, name).submit(sbatch=(f"--partition={partition}",))
    job.wait_step(12)
    moment = time.time()
    urgent = ("sbatch", "--parsable", "-p", "urgent", "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3")
    urgent_id = lab.cluster.slurm(*urgent)
    lab.cluster.wait_job(urgent_id, ("RUNNING", "COMPLETED"))
    return job.after(event, moment)


def preempted_with_grace(lab: Lab) -> Row:
    return _preempt(lab, "preempt-grace", "preempted with grace and the warning signal", "spot")


def preempted_with_grace_without_warning(lab: Lab) -> Row:
    lab.cluster.reconfigure("preempt_send_user_signal", "enable_configless")
    return _preempt(lab, "preempt-no-warning", "preempted with grace, no warning signal", "spot")


def preempted_without_grace(lab: Lab) -> Row:
    return _preempt(lab, "preempt", "preempted without grace", "main")


DRILLS = {
    drill.__name__: drill
    for drill in (
        stop_signal,
        other_stop_signal,
        rank_killed,
        torchrun_killed_on_head,
        torchrun_killed_on_worker,
        slurmd_killed_and_restarted,
        controller_restarted,
        network_cut_for_4_seconds,
        node_set_down,
        preempted_with_grace,
        preempted_with_grace_without_warning,
        preempted_without_grace,
        time_limit,
        time_limit_without_warning,
        worker_powered_off,
        head_powered_off,
        network_cut,
        slurmd_killed_for_good,
    )
}


def main(names: list[str]) -> int:
    """Run the drills and print the table; returns the number of drills that failed."""
    print(HEADER, flush=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="drills-") as folder:
        lab = None
        for number, name in enumerate(names or list(DRILLS)):
            cluster = Cluster(Path(folder) / f"slurm-{number}", nodes=3).up()
            try:
                lab = lab or Lab(cluster, Path(folder))
                lab.cluster = cluster
                print(DRILLS[name](lab), flush=True)
            except (AssertionError, TimeoutError, KeyboardInterrupt) as error:
                failed += 1
                print(f"| {name} | FAILED | | | |", flush=True)
                print(error, cluster.slurm("scontrol", "show", "job"), sep="\n", file=sys.stderr, flush=True)
            finally:
                cluster.down()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
