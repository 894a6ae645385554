"""torchrun, with changes: ranks that ended on purpose are not restarted, and their exit code becomes this one's.

torchrun alone knows zero and non-zero. It would restart a run that was stopped on request (75) or that cannot succeed
(2), and it exits with 1 for every failure. Its rendezvous is replaced too (`launch/supervise/rendezvous.py`). The
arguments are torchrun's:

    python -m launch.supervise.agent --nproc-per-node=2 ... COMMAND
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from launch.supervise.kernel import processes_killed_for_memory
from launch.supervise.network import JOIN_SECONDS
from launch.supervise.rank_logs import Failure, RankLogs, last_lines, was_aborted_for_a_peer
from launch.supervise.secret import VARIABLE, job_secret
from train.exit_codes import FAILED, FINISHED, NEVER_AGAIN, STOPPED
from train.health.safe_output import erase_view, protect_output

HEAD_LOST, NODES_MISSING = 121, 122
"""Exit codes for the supervisor, which knows more (`supervisor._explained`): the connection to node 0 broke while no
rank of this node had failed; not all nodes came to the rendezvous."""


class _NodesMissingError(Exception):
    """Not all nodes came to the rendezvous; the message is their number."""


def group_exit_code(exit_codes: Collection[int]) -> int:
    """Return one exit code for a group of ranks: a failure for good outweighs a stop, a stop outweighs a failure.

    A failure for good on one rank breaks the collectives of the others, which then exit with 1. A rank that exits with
    75 has a checkpoint in which all ranks took part.
    """
    for code in (*NEVER_AGAIN, STOPPED):
        if code in exit_codes:
            return code
    return FAILED if any(exit_codes) else FINISHED


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Keep torch in this process, but not in the ranks, from printing pages of C++ frames about lost nodes."""
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"
    yield
    del os.environ[name]


def main(argv: Sequence[str]) -> int:
    """Run torchrun with these arguments and return the exit code of the ranks."""
    protect_output()
    with _quiet_import():
        from torch.distributed import DistError
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
        from torch.distributed.elastic.rendezvous.api import RendezvousError
        from torch.distributed.launcher import api

        from launch.supervise import rendezvous

    secret = job_secret(os.environ)
    os.environ.pop(VARIABLE, None)  # the ranks need no secret
    rendezvous_handler_registry.register(rendezvous.NAME, lambda params: rendezvous.create(params, secret))
    options = torchrun.parse_args(list(argv))
    logs = RankLogs(Path(options.log_dir), terminal=sys.stderr.isatty())
    torchrun._get_logs_specs_class = lambda _: lambda **_: logs  # pyright: ignore[reportAttributeAccessIssue]
    api.LocalElasticAgent = _agent_class(logs)
    for name in ("multiprocessing.api", "rendezvous.dynamic_rendezvous", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)  # reported below instead
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        return group_exit_code([failure.exitcode for failure in error.failures.values()])
    except SignalException as error:
        print(f"keepstep: ranks killed on {signal.Signals(error.sigval).name}", file=sys.stderr)
        return FAILED
    except _NodesMissingError as came:
        print(
            f"keepstep: {came} of {options.nnodes} nodes came to the rendezvous at {options.rdzv_endpoint} within "
            f"{JOIN_SECONDS} s; start the others too, and check that they reach that address",
            file=sys.stderr,
        )
        return NODES_MISSING
    except (RendezvousError, DistError):  # the store of the rendezvous is in the agent of node 0
        return HEAD_LOST
    finally:
        logs.close()
    return FINISHED


def _agent_class(logs: RankLogs) -> Any:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

    killed_before = processes_killed_for_memory()

    class Agent(LocalElasticAgent):
        def _rendezvous(self, worker_group: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
            came = _count_nodes(worker_group.spec.rdzv_handler)
            try:
                super()._rendezvous(worker_group)  # pyright: ignore[reportCallIssue]
            except RendezvousTimeoutError:
                raise _NodesMissingError(max(came)) from None

        def _monitor_workers(self, worker_group: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
            result: Any = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
            if result.is_failed():
                code = group_exit_code([failure.exitcode for failure in result.failures.values()])
                if code in (STOPPED, *NEVER_AGAIN):
                    self._remaining_restarts = 0
                if code != STOPPED:
                    _report_root_cause(result.failures, logs, self._remaining_restarts, killed_before)
            return result

    return Agent


def _count_nodes(handler: Any) -> list[int]:
    """Return a list to which the rendezvous appends the number of nodes at each of its exchanges.

    At the time limit each node withdraws before torchrun raises its error, so the last number is too small."""
    holder, came = handler._state_holder, [1]
    exchange = holder.sync

    def counted() -> Any:
        result = exchange()
        came.append(len(holder.state.participants))
        return result

    holder.sync = counted
    return came


def _report_root_cause(failures: dict[int, Any], logs: RankLogs, restarts_left: int, killed_before: int) -> None:
    """Print which rank failed first and the end of its log, and save both for `keepstep status`.

    The log of local rank 0 is not printed: the launcher shows its output already. `killed_before`: processes that the
    kernel had killed for memory when the ranks started."""
    logs.show_all()
    victims = {
        rank for rank, one in failures.items() if was_aborted_for_a_peer(one.exitcode, logs.files.get(one.local_rank))
    }
    rank, first = min(
        failures.items(), key=lambda item: (item[0] in victims, *_suspicion(item[1].timestamp, item[1].exitcode))
    )
    ending = f"signal {signal.Signals(-first.exitcode).name}" if first.exitcode < 0 else f"exit code {first.exitcode}"
    if first.exitcode == -signal.SIGKILL and processes_killed_for_memory() > killed_before:
        ending += ", after the kernel killed processes for memory"
    log = logs.files.get(first.local_rank)
    lines = last_lines(log) if log else []
    action = f"restarting all ranks ({restarts_left} restarts left)" if restarts_left else "giving up"
    text = [f"keepstep: rank {rank} (pid {first.pid}) failed first ({ending}); {action}"]
    text += [f"  rank {rank} | {line}" for line in lines if first.local_rank]
    erase_view()
    print("\n".join(text), file=sys.stderr, flush=True)
    only_lost_a_peer = rank in victims or (
        first.exitcode == FAILED and not any(line.startswith("keepstep: ") for line in lines)
    )
    suspicion = (first.exitcode == -signal.SIGTERM, only_lost_a_peer, first.exitcode not in NEVER_AGAIN)
    failure = Failure(time.time(), rank, socket.gethostname(), ending, suspicion, str(log or ""), lines)
    try:
        failure.save(Path(logs.root_log_dir))
    except OSError as error:
        print(f"keepstep: the failure was not saved for `keepstep status`: {error}", file=sys.stderr)


def _suspicion(second: int, exit_code: int) -> tuple[bool, int, bool, bool]:
    """Return a key that sorts the root cause first: torchrun sends SIGTERM to the rest, and counts whole seconds."""
    return exit_code == -signal.SIGTERM, second, exit_code not in NEVER_AGAIN, exit_code >= 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
