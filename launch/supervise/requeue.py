"""What the job script does when the ranks have ended: go on in a new attempt, or let it be. Used by slurm/train.sbatch.

    python -m launch.supervise.requeue mark RUN            # before: the time, and the newest checkpoint's step
    python -m launch.supervise.requeue decide RUN ...      # after: prints "requeue: why" or "leave: why"

A job is requeued if it stopped because it was told to make room, or failed in a way that another try may not meet
again; only if the attempt got further than the one before; only so often; never after a cancel, a `keepstep stop` or
a failure for good.
"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.exit_codes import FAILED, FAILED_FOR_GOOD, FINISHED, STOPPED
from train.records.events import read_jsonl

BY_REQUEST = "keepstep stop"


@dataclass(frozen=True)
class Attempt:
    """How one attempt of a job went."""

    code: int
    """Of the training processes: `train/exit_codes.py`."""
    why: str
    number: int
    limit: int
    progress: bool
    """A later step was saved than when the attempt began."""
    state: str = "RUNNING"
    reason: str = "None"
    """Slurm's view of the job."""
    unhealthy: str = ""


def decide(attempt: Attempt) -> tuple[bool, str]:
    """Whether to requeue, and why (not)."""
    if attempt.code == FINISHED:
        return False, "the run is finished"
    if attempt.code == FAILED_FOR_GOOD:
        return False, f"failed for good: {attempt.why}"
    if attempt.code == STOPPED and attempt.why == BY_REQUEST:
        return False, "stopped by `keepstep stop`; submit again to go on"
    if attempt.state != "RUNNING" and attempt.reason != "TimeLimit":
        return (
            False,
            f"the job is {attempt.state} ({attempt.reason}): cancelled jobs stay so, Slurm requeues the others",
        )
    if attempt.number >= attempt.limit:
        return False, f"gave up after {attempt.number} requeues (--requeue-limit)"
    if attempt.unhealthy:
        return True, f"without the unhealthy nodes {attempt.unhealthy}"
    if attempt.code == STOPPED:
        return True, f"stopped and saved ({attempt.why})"
    if not attempt.progress:
        return False, f"failed without progress: {attempt.why}; another try would meet it again"
    return True, f"failed after progress: {attempt.why}"


def ending(run: Path, since: float, launcher_code: int) -> tuple[int, str]:
    """Exit code and reason of the ranks: by the run's own events, else by what the launcher said."""
    codes = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}
    events = [event for event in read_jsonl(run / "events.jsonl") if event["time"] >= since]
    endings = [event for event in events if event["kind"] in codes]
    if endings:
        last: dict[str, Any] = endings[-1]
        if last["kind"] == "stopped" and any(event["kind"] == "stop_requested" for event in events):
            return STOPPED, BY_REQUEST
        return last.get("exit_code", codes[last["kind"]]), str(last.get("reason") or last.get("error") or last["kind"])
    if launcher_code in (FINISHED, FAILED_FOR_GOOD, STOPPED):
        return launcher_code, f"exit code {launcher_code}"
    return FAILED, f"the launcher's exit code was {launcher_code}"


def saved_step(run: Path) -> int:
    """Of the newest checkpoint; -1 if there is none."""
    names = [re.fullmatch(r"step-(\d+)", folder.name) for folder in (run / "checkpoints").glob("step-*")]
    return max((int(name[1]) for name in names if name), default=-1)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.supervise.requeue")
    parser.add_argument("action", choices=("mark", "decide"))
    parser.add_argument("run", type=Path)
    parser.add_argument("--mark", default="0:-1")
    parser.add_argument("--launcher-code", type=int, default=FAILED)
    parser.add_argument("--unhealthy", default="")
    parser.add_argument("--state", default="RUNNING")
    parser.add_argument("--reason", default="None")
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--limit", type=int, default=0)
    options = parser.parse_args(argv)
    if options.action == "mark":
        print(f"{time.time():.3f}:{saved_step(options.run)}")
        return FINISHED
    since, _, step = options.mark.partition(":")
    code, why = ending(options.run, float(since), options.launcher_code)
    if options.unhealthy:
        code, why = FAILED, "unhealthy nodes"
    progress = saved_step(options.run) > int(step)
    again, sentence = decide(
        Attempt(
            code,
            why,
            options.attempt,
            options.limit,
            progress,
            options.state,
            options.reason,
            options.unhealthy,
        )
    )
    print(f"{'requeue' if again else 'leave'}: {sentence}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
