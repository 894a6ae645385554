"""Output of ranks: one file for each node and rank, `RUN/logs/HOST/rank-N.log`, to which every start appends.

torchrun would make a new folder for each start and a new file for each stream. Here it writes no files: the shell line
REDIRECT, which starts every rank, appends both streams to the rank's file. The output of a node's first rank is also
shown by the launcher. If the launcher has a terminal, that rank writes to the terminal and has no file.
"""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from data_pipeline.file_lock import open_lock
from data_pipeline.untrusted import read_file
from train.records.jsonl import is_seconds

VARIABLE = "KEEPSTEP_LOG"
REDIRECT = f'[ -z "${VARIABLE}" ] || exec >>"${VARIABLE}" 2>&1; exec "$@"'
HEADER = "=== "
FAILURE = "failure.json"
_LARGEST_FAILURE = 1 << 22
"""Bytes of a saved failure that are read."""
TAIL_BYTES = 4 << 20
"""Bytes of a log that are read: every start appends to it, so it may be large."""
LAST_LINES = 30
"""Lines of a failed rank's log that are shown and saved."""
LOST_PEER = ("collective operation timeout", "ncclRemoteError", "remote process exited")
"""What NCCL's watchdog writes when it aborts a rank whose peer has failed or hangs."""


class RankLogs:
    """Where torchrun sends the output of its ranks (torchrun's `LogsSpecs`), used at each start of the ranks."""

    def __init__(self, folder: Path, terminal: bool) -> None:
        self._lock, folder = _own_folder(folder)
        self.root_log_dir = str(folder)
        self.files: dict[int, Path] = {}
        """Log file of each local rank, for the newest start."""
        self._folder, self._terminal = folder, terminal
        self._shown: Follower | None = None

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        """Begin a start: write a header to each rank's file, and set the file in each rank's environment `envs`."""
        from torch.distributed.elastic.multiprocessing.api import LogsDest

        self.show_all()
        self.files = {}
        for local_rank, env in envs.items():
            env[VARIABLE] = env["TORCHELASTIC_ERROR_FILE"] = ""
            if local_rank or not self._terminal:
                self._open(local_rank, env)
        none = dict.fromkeys(envs, "")
        return LogsDest(none, none, {}, {}, none)

    def _open(self, local_rank: int, env: dict[str, str]) -> None:
        file = self._folder / f"rank-{env['RANK']}.log"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(header(env))
                end = lines.tell()
        except OSError as error:
            print(f"keepstep: rank {env['RANK']} writes here, not to {file}: {error.strerror}", file=sys.stderr)
            return
        env[VARIABLE] = str(file)
        self.files[local_rank] = file
        if local_rank == 0:
            prefix = f"[{env['RANK']}] " if int(env["GROUP_WORLD_SIZE"]) > 1 else ""
            self._shown = Follower(file, end, prefix, sys.stderr)

    def show_all(self) -> None:
        """Show the rest of the first rank's output, and stop following its file."""
        if self._shown is not None:
            self._shown.close()
            self._shown = None

    def close(self) -> None:
        """Show the rest, and let another launcher use the folder."""
        self.show_all()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _own_folder(folder: Path) -> tuple[int | None, Path]:
    """Return a lock on the folder and the folder, or None and a folder beside it if another launcher uses it.

    The run's lease refuses the ranks of a second launcher. Its logs must not mix with those of the first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_lock(folder / ".lock")
    except OSError:
        return None, folder
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None, folder / f"beside-{os.getpid()}"
    except OSError:  # a file system without locks
        pass
    return lock, folder


def header(env: Mapping[str, str]) -> str:
    """Return the line that begins the output of one start of a rank."""
    rank = f"rank {env['RANK']} of {env['WORLD_SIZE']}, {env['TORCHELASTIC_RUN_ID']}"
    return f"{HEADER}{time.strftime('%F %T')} {rank}, restart {env['TORCHELASTIC_RESTART_COUNT']}\n"


def last_lines(log: Path) -> list[str]:
    """Return the last lines that a rank wrote since its newest start, LAST_LINES at most."""
    return _lines_since_start(log)[-LAST_LINES:]


def was_aborted_for_a_peer(exit_code: int, log: Path | None) -> bool:
    """Return whether NCCL's watchdog aborted the rank because of another one, which is then the cause."""
    if exit_code != -signal.SIGABRT or log is None:
        return False
    return any(sign in line for line in _lines_since_start(log) for sign in LOST_PEER)


def _lines_since_start(log: Path) -> list[str]:
    """Return the lines that a rank wrote since its newest start, as far as TAIL_BYTES reach."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).decode("utf-8", errors="replace").splitlines()
    if size > TAIL_BYTES:
        del lines[:1]  # cut off
    starts = [i for i, line in enumerate(lines) if line.startswith(HEADER)]
    return lines[starts[-1] + 1 :] if starts else lines


class Follower:
    """A thread that copies new lines of a file, from a position on, to another stream."""

    def __init__(self, file: Path, position: int, prefix: str, out: TextIO) -> None:
        self._file, self._position, self._prefix, self._out = file, position, prefix, out
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        with self._file.open(encoding="utf-8", errors="replace") as lines:
            lines.seek(self._position)
            ended = False
            while not ended:
                ended = self._ended.wait(0.1)  # read once more after the end
                for line in lines:
                    self._out.write(self._prefix + line)
                self._out.flush()

    def close(self) -> None:
        """Copy the rest of the file and end the thread."""
        self._ended.set()
        self._thread.join()


@dataclass(frozen=True)
class Failure:
    """The rank of a node that failed first, as saved in `failure.json`."""

    time: float
    """Seconds since the epoch."""
    rank: int
    host: str
    ending: str
    """`exit code 1` or `signal SIGKILL`."""
    suspicion: tuple[bool, ...]
    """Sort key over nodes: the lowest is most likely the cause of the other failures."""
    log: str
    """Path of the rank's log; "" if it wrote to the terminal."""
    lines: list[str]
    """Last lines of the log."""

    def save(self, folder: Path) -> None:
        """Write `failure.json` beside the logs of the node, in place of an earlier failure's."""
        part = folder / f".{FAILURE}.part"
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(folder / FAILURE)


def _is_failure(failure: Failure) -> bool:
    """Return whether the fields that were read have the types of a failure."""
    if not isinstance(failure.lines, list) or not isinstance(failure.suspicion, list):
        return False
    texts = (failure.host, failure.ending, failure.log, *failure.lines)
    right = all(isinstance(text, str) for text in texts) and all(isinstance(one, bool) for one in failure.suspicion)
    return right and is_seconds(failure.time) and failure.time >= 0


def root_cause(logs: Path, since: float) -> Failure | None:
    """Return the failure that caused the others, among those that nodes saved since a moment; None if there is none."""
    found = [failure for failure in saved_failures(logs) if failure.time >= since]
    return min(found, key=lambda failure: (list(failure.suspicion), failure.time), default=None)


def saved_failures(logs: Path) -> list[Failure]:
    """Return the failure that each node saved last. Files that hold none are left out."""
    found: list[Failure] = []
    for file in sorted(logs.glob(f"*/{FAILURE}")):
        try:
            failure = Failure(**json.loads(read_file(file, limit=_LARGEST_FAILURE)))
        except (OSError, ValueError, TypeError, RecursionError):
            continue
        if _is_failure(failure):
            found.append(failure)
    return found
