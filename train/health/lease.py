"""One run at a time in a run folder.

The holder writes who it is and counts up every few seconds. Whoever finds a lease takes it over at once if the holder
is provably gone (a dead process on this host, or on another one an earlier attempt of the same job), and otherwise
watches: a count that moves means that the holder lives, and the newcomer refuses; one that stands still has expired.
Watching the count needs no agreement between clocks.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from parallel.errors import LaunchError

log = logging.getLogger(__name__)

BEAT_SECONDS = 3.0
EXPIRY_SECONDS = 15.0


@dataclass(frozen=True)
class Holder:
    id: str
    host: str
    pid: int
    started: float
    """When the process started, so that a reused pid is not taken for it."""
    job: str
    """Slurm's job or torchrun's run id; empty for neither."""
    requeues: int = 0
    restarts: int = 0
    """How often Slurm has started the job again, and torchrun the ranks within it."""

    @classmethod
    def myself(cls, env: Mapping[str, str]) -> "Holder":
        job = env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID", "")
        started = psutil.Process().create_time()
        counts = [int(env.get(name) or 0) for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
        job = "" if job == "none" else job
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), started, job, *counts)

    def is_gone(self, me: "Holder") -> bool:
        """Provably; a holder on another host may be alive, unless it is of an attempt that was ended before ours began.

        Two runs in one job are two runs: neither count tells which of them came first."""
        if self.host != me.host:
            return self.job != "" and self.job == me.job and self._attempt < me._attempt
        try:
            process = psutil.Process(self.pid)
            return process.create_time() != self.started or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    @property
    def _attempt(self) -> tuple[int, int]:
        return self.requeues, self.restarts

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f", job {self.job}" if self.job else "")


class Lease:
    """Held until `release`. `on_loss` is called, in a thread, if somebody else took it meanwhile."""

    def __init__(self, path: Path, me: Holder, on_loss: Callable[[str], None]) -> None:
        self._path, self._me, self._on_loss = path, me, on_loss
        self._count = 0
        self._released = threading.Event()
        self._acquire()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        with _locked(self._path):
            if self._holder_and_count()[0] == self._me:
                self._path.unlink()

    def _acquire(self) -> None:
        watched_since, seen = time.monotonic(), self._holder_and_count()
        while True:
            with _locked(self._path):
                holder, count = self._holder_and_count()
                expired = time.monotonic() - watched_since > EXPIRY_SECONDS
                if holder is None or holder.is_gone(self._me) or expired:
                    self._write()
                    return
            if (holder, count) != seen:
                raise LaunchError(
                    f"the run folder {self._path.parent} is in use by {holder}; wait until that run has ended "
                    f"(`keepstep stop {self._path.parent}` stops it), or give this run another name"
                )
            time.sleep(0.5)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            try:
                lost_to = self._renew()
            except OSError as error:  # a full disk, say; the next beat may find it mended
                log.warning("the lease %s was not renewed: %s", self._path, error)
                continue
            if lost_to is not None:
                self._on_loss(f"the lease of {self._path.parent} was taken by {lost_to}")
                return

    def _renew(self) -> "Holder | str | None":
        """Who holds it instead of us; None if all is well."""
        with _locked(self._path):
            holder, _ = self._holder_and_count()
            if holder != self._me:
                return holder or "nobody: its file is gone"
            self._count += 1
            self._write()
            return None

    def _holder_and_count(self) -> tuple[Holder | None, int]:
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
            return Holder(**record["holder"]), record["count"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None, 0

    def _write(self) -> None:
        partial = self._path.with_name(f"{self._path.name}.{self._me.id}")
        partial.write_text(json.dumps({"holder": asdict(self._me), "count": self._count}), encoding="utf-8")
        partial.replace(self._path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A short critical section among processes that share the folder."""
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
