"""The supervisor: runs one node's launcher to its end, passes stop signals on to the ranks, leaves no process behind.

    keepstep run ── supervisor (this process; no torch)
                      └─ agent (torchrun; ignores stop signals)
                           └─ ranks (ignore stop signals until they install their own handlers)

Slurm and terminals signal every process of a step, and torchrun dies of signals that it does not expect. So only two
kinds of process handle a stop: the ranks, and the supervisor, in case the signal reached it alone. The supervisor
repeats the signal every second, because a rank that is still starting ignores it. If another node is lost
(`launch/supervise/peers.py`), the supervisor ends its own ranks, which would wait for that node forever.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

from launch.supervise.agent import HEAD_LOST, NODES_MISSING
from launch.supervise.peers import Peers
from train.exit_codes import FAILED
from train.health.safe_output import erase_view
from train.health.stop import NOHUP, SIGNALS, ignores_hangup, stop_signals

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
HEAD_SECONDS = 2.0
"""Longest time that the exit code of node 0 takes to arrive after the connection to it broke."""


def supervise(
    argv: Sequence[str],
    env: Mapping[str, str],
    stop_seconds: float,
    peers: Peers | None = None,
    record_lost: Callable[[str], None] = lambda _: None,
) -> int:
    """Run the agent and return its exit code, or FAILED if it was killed.

    The ranks are killed if they have not ended `stop_seconds` after a stop signal. `peers` exchanges heartbeats with
    the other nodes; `record_lost` is told which of them is lost."""
    env = {**env, NOHUP: str(int(ignores_hangup(os.environ)))}
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks of a killed agent become children of this process

    def in_child() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)  # torchrun's own handler then kills the ranks
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    received: list[int] = []
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in stop_signals()}
    agent = subprocess.Popen(list(argv), env=env, preexec_fn=in_child)
    try:
        if peers:
            peers.start()
        code = _wait(agent, received, stop_seconds, peers, record_lost)
    finally:
        kill(psutil.Process().children(recursive=True))
        for number, handler in before.items():
            signal.signal(number, handler)
    if code < 0:
        print(
            f"keepstep: torchrun was killed by {signal.Signals(-code).name}; its ranks were killed too", file=sys.stderr
        )
        code = FAILED
    code = _explained(code, peers)
    if peers:
        peers.leave(code)
    return code


def _explained(code: int, peers: Peers | None) -> int:
    """Return the exit code of the node; print what only the heartbeats know about a failed rendezvous."""
    if code == NODES_MISSING:
        if missing := peers.missing(os.environ) if peers else []:
            print(f"keepstep: no heartbeat from {', '.join(missing)}", file=sys.stderr)
        return FAILED
    if code == HEAD_LOST:
        head_code = peers.head_code(HEAD_SECONDS) if peers else None
        if head_code is not None:  # node 0 has printed the reason
            return head_code
        print("keepstep: the connection to node 0 broke; its log has the reason, or its network", file=sys.stderr)
        return FAILED
    return code


def _wait(
    agent: subprocess.Popen[bytes],
    received: list[int],
    stop_seconds: float,
    peers: Peers | None,
    record_lost: Callable[[str], None],
) -> int:
    """Wait for the agent; pass the signals in `received` on to its ranks. Returns its exit code."""
    deadline = float("inf")
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return agent.wait(0.2 if not received else 1.0)
        lost = peers.lost(hurry=bool(received)) if peers else None
        if lost:
            print(f"keepstep: {lost}; ending the ranks of this node, which wait for it", file=sys.stderr)
            record_lost(lost)
            return FAILED
        if not received:
            continue
        if deadline == float("inf"):
            deadline = time.monotonic() + stop_seconds
            erase_view()
            print(f"keepstep: {signal.Signals(received[0]).name}: asking the ranks to save and stop", file=sys.stderr)
        if time.monotonic() > deadline:
            print(f"keepstep: the ranks did not stop within {stop_seconds:.0f} s; killing them", file=sys.stderr)
            agent.kill()
        for rank in _children(agent.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(received[0])


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children()
    return []


def kill(processes: Sequence[psutil.Process], wait_seconds: float = 10.0) -> None:
    """Send SIGKILL to the processes and wait until they have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=wait_seconds)


def leftover_processes(run: str, env: Mapping[str, str]) -> list[psutil.Process]:
    """Return the processes of this run on this machine that no supervisor controls.

    These are ranks whose launcher is dead, and all processes of an earlier attempt of the same Slurm job (on a node
    that lost its network and came back). Processes of a live run are not among them; its lease protects its folder.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            its_env = process.environ()
            of_this_run = its_env.get("KEEPSTEP_RUN") == run and process.pid != os.getpid()
            if of_this_run and (_is_earlier_attempt(its_env, env) or _is_orphan(process)):
                found.append(process)
    return found


def _is_earlier_attempt(its_env: Mapping[str, str], env: Mapping[str, str]) -> bool:
    job = env.get("SLURM_JOB_ID")
    its_attempt, attempt = (int(each.get("SLURM_RESTART_COUNT") or 0) for each in (its_env, env))
    return job is not None and its_env.get("SLURM_JOB_ID") == job and its_attempt < attempt


def _is_orphan(process: psutil.Process) -> bool:
    """Return whether this is a rank without an agent or supervisor among its ancestors."""
    return "RANK" in process.environ() and not any("KEEPSTEP_RUN" in _environ(p) for p in process.parents())


def _environ(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        return process.environ()
    return {}
