"""The verdict on an attempt that has just failed, for the launcher and for the decision to requeue a job."""

import logging
import time
from pathlib import Path

from launch.diagnose.reading import read_evidence
from launch.diagnose.verdict import Diagnosis, diagnose

log = logging.getLogger(__name__)


def diagnose_failure(run: Path, since: float, progress: bool | None = None) -> Diagnosis | None:
    """Return the verdict on the ranks that were started since a moment and have ended; None if there can be none.

    A mistake in a rule is logged with its traceback. It must not cost a run its next attempt."""
    try:
        return diagnose(read_evidence(run, time.time(), since=since, has_ended=True), progress)
    except Exception:
        log.exception("the failure of %s cannot be diagnosed", run)
        return None
