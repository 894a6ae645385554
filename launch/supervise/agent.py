"""torchrun, except that ranks which ended on purpose are not started again, and their exit code is this one's.

torchrun knows only zero and non-zero: it would restart a run that stopped on request (75) or cannot succeed (2), and
answers 1 for every failure. Takes torchrun's arguments:

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

from launch.supervise.rank_logs import Failure, RankLogs, last_lines
from train.exit_codes import FAILED, FAILED_FOR_GOOD, FINISHED, STOPPED


def outcome(exit_codes: Collection[int]) -> int:
    """One exit code for a group of ranks: a failure for good outweighs a stop, a stop outweighs a failure.

    A failure for good on one rank breaks the collectives of the others, which then exit with 1; a rank that says
    "stopped" has a checkpoint that all ranks took part in.
    """
    for code in (FAILED_FOR_GOOD, STOPPED):
        if code in exit_codes:
            return code
    return FAILED if any(exit_codes) else FINISHED


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """torch, as it is imported in here, tells of lost nodes without pages of C++ frames; its ranks keep theirs."""
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"
    yield
    del os.environ[name]


def main(argv: Sequence[str]) -> int:
    with _quiet_import():
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import RendezvousError
        from torch.distributed.launcher import api

    options = torchrun.parse_args(list(argv))
    logs = RankLogs(Path(options.log_dir), terminal=sys.stderr.isatty())
    torchrun._get_logs_specs_class = lambda _: lambda **_: logs  # pyright: ignore[reportAttributeAccessIssue]
    api.LocalElasticAgent = _agent_class(logs)
    for name in ("multiprocessing.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)  # we say it better
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        return outcome([failure.exitcode for failure in error.failures.values()])
    except SignalException as error:
        print(f"keepstep: ranks killed on {signal.Signals(error.sigval).name}", file=sys.stderr)
        return FAILED
    except RendezvousError as error:
        print(f"keepstep: the nodes did not meet: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    finally:
        logs.show_all()
    return FINISHED


def _agent_class(logs: RankLogs) -> Any:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
            result: Any = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
            if result.is_failed():
                code = outcome([failure.exitcode for failure in result.failures.values()])
                if code in (STOPPED, FAILED_FOR_GOOD):
                    self._remaining_restarts = 0
                if code != STOPPED:
                    _tell_root_cause(result.failures, logs, self._remaining_restarts)
            return result

    return Agent


def _tell_root_cause(failures: dict[int, Any], logs: RankLogs, restarts_left: int) -> None:
    """Show the rank that failed first, and the end of what it said unless all of it was shown already (local rank 0);
    and note it for `keepstep status`."""
    logs.show_all()
    rank, first = min(failures.items(), key=lambda item: _suspicion(item[1].timestamp, item[1].exitcode))
    ending = f"signal {signal.Signals(-first.exitcode).name}" if first.exitcode < 0 else f"exit code {first.exitcode}"
    log = logs.files.get(first.local_rank)
    lines = last_lines(log) if log else []
    then = f"starting all ranks again ({restarts_left} restarts left)" if restarts_left else "giving up"
    text = [f"keepstep: rank {rank} (pid {first.pid}) ended first, by {ending}; {then}"]
    text += [f"  rank {rank} | {line}" for line in lines if first.local_rank]
    print("\n".join(text), file=sys.stderr, flush=True)
    silent = first.exitcode == FAILED and not any(line.startswith("keepstep: ") for line in lines)
    suspicion = (first.exitcode == -signal.SIGTERM, silent, first.exitcode != FAILED_FOR_GOOD)
    failure = Failure(time.time(), rank, socket.gethostname(), ending, suspicion, str(log or ""), lines)
    try:
        failure.save(Path(logs.root_log_dir))
    except OSError as error:
        print(f"keepstep: the failure was not noted: {error}", file=sys.stderr)


def _suspicion(second: int, exit_code: int) -> tuple[bool, int, bool, bool]:
    """Sorts the root cause first: torchrun itself sends SIGTERM to the rest, and its clock counts whole seconds."""
    return exit_code == -signal.SIGTERM, second, exit_code != FAILED_FOR_GOOD, exit_code >= 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
