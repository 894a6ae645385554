"""Runs one node's launcher to its end: passes stop signals on to the ranks, and leaves no process behind.

    keepstep run ── supervisor (this process; no torch)
                      └─ agent (torchrun; ignores stop signals)
                           └─ ranks (inherit "ignored" until their own handlers stand)

Slurm and terminals signal every process of a step, and torchrun dies of what it does not expect. So only two listen:
the ranks, and this process for the case that nobody else was told. It repeats a stop every second, since a rank that
is just starting ignores it. When another node is lost (`launch/supervise/peers.py`), it ends its
own ranks, which wait for it.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import psutil

from launch.supervise.peers import Peers
from train.exit_codes import FAILED
from train.health.stop import SIGNALS

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def supervise(argv: Sequence[str], env: Mapping[str, str], stop_seconds: float, peers: Peers | None = None) -> int:
    """Run the agent; its exit code, or FAILED if it was killed. A stop must be done within `stop_seconds`.

    `peers`: of several nodes, the talk with the others."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks of a killed agent become our children

    def in_child() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)  # torchrun's own handler then kills the ranks
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    asked: list[int] = []
    before = {number: signal.signal(number, lambda n, _: asked.append(n)) for number in SIGNALS}
    agent = subprocess.Popen(list(argv), env=dict(env), preexec_fn=in_child)
    try:
        if peers:
            peers.start()
        code = _wait(agent, asked, stop_seconds, peers)
    finally:
        kill(psutil.Process().children(recursive=True))
        for number, handler in before.items():
            signal.signal(number, handler)
    if code < 0:
        print(f"keepstep: torchrun was killed by {signal.Signals(-code).name}; its ranks too", file=sys.stderr)
        code = FAILED
    if peers:
        peers.leave(code)
    return code


def _wait(agent: subprocess.Popen[bytes], asked: list[int], stop_seconds: float, peers: Peers | None) -> int:
    deadline = float("inf")
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return agent.wait(0.2 if not asked else 1.0)
        lost = peers.lost(hurry=bool(asked)) if peers else None
        if lost:
            print(f"keepstep: {lost}, and the ranks here wait for it; ending them", file=sys.stderr)
            return FAILED
        if not asked:
            continue
        if deadline == float("inf"):
            deadline = time.monotonic() + stop_seconds
            print(f"keepstep: {signal.Signals(asked[0]).name}: asking the ranks to save and stop", file=sys.stderr)
        if time.monotonic() > deadline:
            print(f"keepstep: not stopped after {stop_seconds:.0f} s; killing the ranks", file=sys.stderr)
            agent.kill()
        for rank in _children(agent.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(asked[0])


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children()
    return []


def kill(processes: Sequence[psutil.Process], wait_seconds: float = 10.0) -> None:
    """SIGKILL them and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=wait_seconds)


def left_over(run: str, env: Mapping[str, str]) -> list[psutil.Process]:
    """Processes of this run on this machine that nobody looks after any more.

    Such are ranks whose launcher is dead, and everything of an earlier attempt of this very Slurm job (a node that
    was cut off and came back). Processes of a run that is alive are left alone: the run folder's lease says so.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            theirs = process.environ()
            ours = theirs.get("KEEPSTEP_RUN") == run and process.pid != os.getpid()
            if ours and (_is_earlier_attempt(theirs, env) or _is_orphan(process)):
                found.append(process)
    return found


def _is_earlier_attempt(theirs: Mapping[str, str], ours: Mapping[str, str]) -> bool:
    job = ours.get("SLURM_JOB_ID")
    attempts = [int(env.get("SLURM_RESTART_COUNT") or 0) for env in (theirs, ours)]
    return job is not None and theirs.get("SLURM_JOB_ID") == job and attempts[0] < attempts[1]


def _is_orphan(process: psutil.Process) -> bool:
    """A rank that no agent and no supervisor is above."""
    return "RANK" in process.environ() and not any("KEEPSTEP_RUN" in _environ(p) for p in process.parents())


def _environ(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        return process.environ()
    return {}
