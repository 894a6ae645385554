"""The decision whether a Slurm job is requeued after its ranks have ended. Called by slurm/train.sbatch.

    python -m launch.supervise.requeue mark RUN ...       # before the start: prints the time and the newest step
    python -m launch.supervise.requeue decide RUN ...     # after the end: prints "requeue: WHY" or "not requeued: WHY"

A job is requeued if it was stopped to free its nodes, or if it failed in a way that another attempt may not repeat.
After a failure the attempt must have saved a later step than the one before. If a rule of `keepstep diagnose` names the
cause, it may forbid another attempt, or permit one without progress because the cause lay outside of the run. The
number of requeues is limited. A cancel, a `keepstep stop` or a failure for good ends the job.
`keepstep stop` also ends jobs that wait: `mark` exits with STOPPED if the request came after the job was submitted.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from launch.diagnose.after_failure import diagnose_failure
from launch.diagnose.rule import Action
from launch.diagnose.verdict import Diagnosis
from launch.diagnose.words import in_one_line, is_explained
from train.checkpoint.stores.steps import newest_step
from train.exit_codes import FAILED, FINISHED, NEVER_AGAIN, STOPPED
from train.health.stop import SIGNALS
from train.records.events import events_backwards, read_events
from train.run_folder import RunFolder

BY_REQUEST = "keepstep stop"


@dataclass(frozen=True)
class Attempt:
    """How one attempt of a job ended."""

    code: int
    """Exit code of the training processes (`train/exit_codes.py`)."""
    why: str
    """Reason of the end, as shown to people."""
    number: int
    """Requeues of this job so far."""
    limit: int
    """Requeues that are allowed."""
    progress: bool
    """Whether a later step was saved than before the attempt."""
    state: str = "RUNNING"
    """Slurm's JobState at the end of the attempt."""
    reason: str = "None"
    """Slurm's Reason for that state."""
    unhealthy: str = ""
    """Nodes that failed the health check, separated by commas."""
    cause: Diagnosis | None = None
    """Why the ranks failed, if a rule explains it."""


def decide(attempt: Attempt) -> tuple[bool, str]:
    """Return whether to requeue the job, and the reason."""
    if attempt.code == FINISHED:
        return False, "the run is finished"
    if attempt.code in NEVER_AGAIN:
        return False, f"failed for good: {attempt.why}"
    if attempt.code == STOPPED and attempt.why == BY_REQUEST:
        return False, "stopped by `keepstep stop`; submit again to resume"
    if attempt.state != "RUNNING" and attempt.reason != "TimeLimit":
        return (
            False,
            f"the job is {attempt.state} ({attempt.reason}): a cancelled job ends, Slurm itself requeues the others",
        )
    if attempt.number >= attempt.limit:
        return False, f"gave up after {attempt.number} requeues (--requeue-limit)"
    if attempt.unhealthy:
        return True, f"without the unhealthy nodes {attempt.unhealthy}"
    if attempt.code == STOPPED:
        return True, f"stopped ({attempt.why})"
    if attempt.cause is not None:
        again = attempt.cause.action == Action.RESTART.value
        return again, f"failed {'after' if attempt.progress else 'without'} progress: {in_one_line(attempt.cause)}"
    if not attempt.progress:
        return False, f"failed without progress: {attempt.why}; another attempt would fail the same way"
    return True, f"failed after progress: {attempt.why}"


def ending(run: Path, since: float, launcher_code: int) -> tuple[int, str]:
    """Return the exit code of the ranks and the reason, from the run's events, else from the launcher's exit code."""
    codes = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}
    events = [event for event in read_events(RunFolder(run).events) if event["time"] >= since]
    endings = [event for event in events if event["kind"] in codes]
    if endings:
        last: dict[str, Any] = endings[-1]
        if last["kind"] == "stopped" and any(event["kind"] == "stop_requested" for event in events):
            return STOPPED, BY_REQUEST
        return last.get("exit_code", codes[last["kind"]]), str(last.get("reason") or last.get("error") or last["kind"])
    if launcher_code in (FINISHED, *NEVER_AGAIN, STOPPED):
        return launcher_code, f"exit code {launcher_code}"
    if launcher_code - 128 in SIGNALS:  # as shells tell it: the signal came before the launcher could catch it
        return STOPPED, f"{signal.Signals(launcher_code - 128).name} before the start"
    return FAILED, f"the launcher's exit code was {launcher_code}"


def explain(run: Path, since: float, progress: bool) -> Diagnosis | None:
    """Return the cause of a failure since a moment; None if no rule explains it. The ranks have ended."""
    found = diagnose_failure(run, since, progress)
    return found if found is not None and is_explained(found) else None


def stopped_while_waiting(run: Path, submitted: str) -> bool:
    """Return whether `keepstep stop` asked the run to stop after a job was submitted.

    `submitted`: Slurm's SubmitTime, in whole seconds of local time; requeueing sets it anew."""
    try:
        since = datetime.fromisoformat(submitted).timestamp() + 1
    except ValueError:  # Slurm prints another format (SLURM_TIME_FORMAT)
        return False
    requests = events_backwards(RunFolder(run).events, ["stop_requested"])
    return any(event["time"] > since for event in requests)


def saved_step(run: Path) -> int:
    """Return the step of the run's newest checkpoint, or -1 if it has none, so that step 0 counts as progress."""
    step = newest_step(RunFolder(run).checkpoints)
    return -1 if step is None else step


def main(argv: Sequence[str]) -> int:
    """Print the mark or the verdict. `decide` returns the exit code of the ranks."""
    parser = argparse.ArgumentParser(prog="python -m launch.supervise.requeue")
    parser.add_argument("action", choices=("mark", "decide"))
    parser.add_argument("run", type=Path)
    parser.add_argument("--submitted", default="", help="Slurm's SubmitTime of the job")
    parser.add_argument("--mark", default="0:-1", help="what `mark` printed")
    parser.add_argument("--launcher-code", type=int, default=FAILED, help="exit code of `keepstep run`")
    parser.add_argument("--unhealthy", default="", help="nodes that failed the health check")
    parser.add_argument("--state", default="RUNNING", help="Slurm's JobState")
    parser.add_argument("--reason", default="None", help="Slurm's Reason")
    parser.add_argument("--attempt", type=int, default=0, help="requeues so far")
    parser.add_argument("--limit", type=int, default=0, help="requeues that are allowed")
    options = parser.parse_args(argv)
    if options.action == "mark" and stopped_while_waiting(options.run, options.submitted):
        RunFolder(options.run).stop_request.unlink(missing_ok=True)
        print("not started: `keepstep stop` asked the run to stop while this job waited; submit again to resume")
        return STOPPED
    if options.action == "mark":
        print(f"{time.time():.3f}:{saved_step(options.run)}")
        return FINISHED
    since, _, step = options.mark.partition(":")
    code, why = ending(options.run, float(since), options.launcher_code)
    if options.unhealthy:
        code, why = FAILED, "unhealthy nodes"
    progress = saved_step(options.run) > int(step)
    attempt = Attempt(
        code=code,
        why=why,
        number=options.attempt,
        limit=options.limit,
        progress=progress,
        state=options.state,
        reason=options.reason,
        unhealthy=options.unhealthy,
        cause=explain(options.run, float(since), progress) if code == FAILED else None,
    )
    requeue, reason = decide(attempt)
    print(f"{'requeue' if requeue else 'not requeued'}: {reason}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
