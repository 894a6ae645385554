"""Where ranks write: one file for each node and rank, `RUN/logs/HOST/rank-N.log`, which later starts append to.

torchrun's own way is a folder for each start and a file for each stream, opened anew. Here it is told that ranks write
to no file of its own; the shell line REDIRECT, which starts every rank, appends both streams to the rank's file. What
the first rank of a node says is shown here as well. On a terminal that rank keeps the terminal and has no file.
"""

import json
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

VARIABLE = "KEEPSTEP_LOG"
REDIRECT = f'[ -z "${VARIABLE}" ] || exec >>"${VARIABLE}" 2>&1; exec "$@"'
HEADER = "=== "
FAILURE = "failure.json"
LAST_LINES = 30
"""Of a failing rank's log."""


class RankLogs:
    """What torchrun asks for the places of its ranks' output (its `LogsSpecs`), once for each start of the ranks."""

    def __init__(self, folder: Path, terminal: bool) -> None:
        self.root_log_dir = str(folder)
        self.files: dict[int, Path] = {}
        """By local rank, of the newest start."""
        self._folder, self._terminal = folder, terminal
        self._shown: Follower | None = None

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        """Tells each rank's file that a new start follows, and each rank its file."""
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
        """The rest of what the first rank said before it ended."""
        if self._shown is not None:
            self._shown.close()
            self._shown = None


def header(env: Mapping[str, str]) -> str:
    """The line that begins what a start of a rank wrote."""
    place = f"rank {env['RANK']} of {env['WORLD_SIZE']}, {env['TORCHELASTIC_RUN_ID']}"
    return f"{HEADER}{time.strftime('%F %T')} {place}, restart {env['TORCHELASTIC_RESTART_COUNT']}\n"


def last_lines(log: Path) -> list[str]:
    """The end of what a rank has written since it was started last."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(HEADER)]
    return lines[starts[-1] + 1 :][-LAST_LINES:] if starts else lines[-LAST_LINES:]


class Follower:
    """Shows what is added to a file, from a position on."""

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
                ended = self._ended.wait(0.1)  # what was written until then is shown below
                for line in lines:
                    self._out.write(self._prefix + line)
                self._out.flush()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@dataclass(frozen=True)
class Failure:
    """The rank of a node that failed first."""

    time: float
    rank: int
    host: str
    ending: str
    """`exit code 1` or `signal SIGKILL`."""
    suspicion: tuple[bool, ...]
    """The lower, the more likely the cause of the others' failures."""
    log: str
    lines: list[str]
    """The end of the log."""

    def save(self, folder: Path) -> None:
        """Beside the logs of the node; replaces that of an earlier failure."""
        part = folder / f".{FAILURE}.part"
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(folder / FAILURE)


def root_cause(logs: Path, since: float) -> Failure | None:
    """Of the failures that nodes noted after a moment, the one that caused the others."""
    found = []
    for file in logs.glob(f"*/{FAILURE}"):
        try:
            failure = Failure(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if failure.time >= since:
            found.append(failure)
    return min(found, key=lambda failure: (list(failure.suspicion), failure.time), default=None)
