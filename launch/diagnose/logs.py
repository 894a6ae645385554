"""Reads the logs of all ranks and of the job script: the newest start of each, within limits of size.

A run of 1,024 ranks has as many logs, and most of them say the same. So equal lines of different ranks are kept once
for each rank, but matched once (`verdict.py`).
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.untrusted import open_file
from launch.diagnose.evidence import Line
from launch.supervise.rank_logs import HEADER

TAIL_BYTES = 1 << 16
"""Bytes that are read from the end of a rank's log."""
JOB_BYTES = 1 << 20
"""Bytes that are read from the end of the log of a job script."""
MOST_LOGS = 1 << 14
MOST_LINES = 200
"""Last lines of a rank's log that are looked at."""
LINE_CHARACTERS = 2000
"""Characters of a line that are looked at."""

_HEADER = re.compile(rf"^{HEADER}\S+ \S+ rank (\d+) of (\d+), (\S+), restart \d+$")
_STAMP = re.compile(r"^(?:\[\d+\] )?\d\d:\d\d:\d\d (?:\[rank \d+\] )?|^\[rank\d+\]: ")
_PROGRESS = re.compile(r"^step \d+(?:/\d+)?  ")
_ERROR = re.compile(r"^(?:\[\d+\] )?keepstep: (?!rank \d+ (?:failed:|\(pid ))")
_ATTEMPT = re.compile(r"\[job \d+ attempt \d+\] nodes ")
_REPEATED = re.compile(r"  |keepstep: root cause: |.*\[job \d+ attempt \d+\] ")
"""Lines that repeat what a rank's log says, and verdicts of before: by the launcher, a command or the job script."""


@dataclass(frozen=True)
class RankLog:
    """The end of what one rank wrote since its newest start."""

    rank: int
    node: str
    written: float
    """Time of the last write, in seconds since 1970."""
    job: str
    """Name of the start, the same on all ranks; "" if its header is too far back."""
    world_size: int
    lines: list[str]


def read_rank_logs(folder: Path, since: float) -> list[RankLog]:
    """Return the logs of the newest start. `since`: logs that were written before it do not count."""
    files = sorted(folder.glob("*/rank-*.log"))[:MOST_LOGS]
    logs = [log for file in files if (log := _rank_log(file)) is not None and log.written >= since]
    named = [log for log in logs if log.job]
    job = max(named, key=lambda log: log.written).job if named else ""
    return [log for log in logs if log.job in (job, "")]


def _rank_log(file: Path) -> RankLog | None:
    number = file.stem.removeprefix("rank-")
    if not number.isdecimal() or len(number) > 9 or (found := _tail(file, TAIL_BYTES)) is None:
        return None
    written, lines = found
    starts = [at for at, line in enumerate(lines) if line.startswith(HEADER)]
    header = _HEADER.match(lines[starts[-1]]) if starts else None
    own = lines[starts[-1] + 1 :] if starts else lines
    job, world_size = (header[3], int(header[2][:9])) if header else ("", 0)
    return RankLog(int(number), file.parent.name, written, job, world_size, own[-MOST_LINES:])


def rank_lines(log: RankLog) -> Iterator[Line]:
    """Yield what the rank said, without times and lines of progress."""
    for text in log.lines:
        bare = _STAMP.sub("", text)
        if bare and not _PROGRESS.match(bare):
            yield Line(bare, log.written, log.rank, log.node, bool(_ERROR.match(bare)))


def job_lines(folder: Path, since: float) -> Iterator[Line]:
    """Yield what the newest attempt of the newest Slurm job said. `since`: older logs do not count."""
    logs = sorted(folder.glob("slurm-*.log"), key=_written)[-1:]
    found = _tail(logs[0], JOB_BYTES) if logs else None
    if found is None or found[0] < since:
        return
    written, lines = found
    starts = [at for at, line in enumerate(lines) if _ATTEMPT.search(line)]
    for text in lines[starts[-1] if starts else 0 :]:
        bare = _STAMP.sub("", text)
        if bare and not _PROGRESS.match(bare) and not _REPEATED.match(bare):
            yield Line(bare, written, is_error=bool(_ERROR.match(bare)))


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _tail(file: Path, limit: int) -> tuple[float, list[str]] | None:
    """Return the time of the last write and the last lines of a file; None if it cannot be read."""
    try:
        with os.fdopen(open_file(file, inside=file.parent), "rb") as opened:
            status = os.fstat(opened.fileno())
            opened.seek(max(0, status.st_size - limit))
            lines = opened.read(limit).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    cut = lines[1:] if status.st_size > limit else lines
    return status.st_mtime, [line[:LINE_CHARACTERS] for line in cut]
