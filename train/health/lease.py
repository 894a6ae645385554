"""A lease that allows one run at a time in a run folder.

The holder writes its identity into a file and increments a count in it every few seconds. A new run that finds a lease
takes it over immediately if the holder is provably gone: a dead process on this host, or, on another host, an earlier
attempt of the same job. Otherwise the new run watches the count. If the count increases, the holder is alive and the
new run refuses to start. If it does not, the lease has expired. Watching a count needs no synchronized clocks.
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
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from parallel.errors import LaunchError

log = logging.getLogger(__name__)

RENEW_SECONDS = 3.0
"""Seconds between two increments of the count."""
EXPIRY_SECONDS = 15.0
"""Seconds without an increment after which the lease has expired."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease."""

    id: str
    """Random name, different for each process."""
    host: str
    pid: int
    started: float
    """Start time of the process in seconds since the epoch; it distinguishes the process from a later one with the
    same pid."""
    job: str
    """Slurm's job id or torchrun's run id; empty if there is neither."""
    requeues: int = 0
    """Times that Slurm requeued the job."""
    restarts: int = 0
    """Times that torchrun restarted the ranks within one job."""

    @classmethod
    def this_process(cls, env: Mapping[str, str]) -> "Holder":
        """This process. `env`: its environment, which names the job."""
        job = env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID", "")
        started = psutil.Process().create_time()
        counts = [int(env.get(name) or 0) for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
        job = "" if job == "none" else job
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), started, job, *counts)

    def is_gone(self, me: "Holder") -> bool:
        """Whether the holder has provably ended.

        A holder on another host may be alive, unless it belongs to an earlier attempt of the same job. If both belong
        to the same attempt, they are two runs within one job, and this one must not take over."""
        if self.host != me.host:
            return self.job != "" and self.job == me.job and self._attempt < me._attempt
        try:
            process = psutil.Process(self.pid)
            return process.create_time() != self.started or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    @property
    def _attempt(self) -> tuple[int, int]:
        """Orders the attempts of one job."""
        return self.requeues, self.restarts

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f", job {self.job}" if self.job else "")


class Lease:
    """A lease on a run folder, held from construction until `release`.

    Raises LaunchError if another live process holds it. `on_loss` is called in a thread, with the reason, if another
    process takes the lease."""

    def __init__(self, path: Path, me: Holder, on_loss: Callable[[str], None]) -> None:
        self._path, self._me, self._on_loss = path, me, on_loss
        self._count = 0
        self._released = threading.Event()
        self._acquire()
        self._thread = threading.Thread(target=self._renew_until_released, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop renewing, and remove the file unless another process has taken the lease."""
        self._released.set()
        self._thread.join()
        with _locked(self._path):
            if self._holder_and_count()[0] == self._me:
                self._path.unlink()

    def _acquire(self) -> None:
        watched_since, first_seen = time.monotonic(), self._holder_and_count()
        while True:
            with _locked(self._path):
                holder, count = self._holder_and_count()
                expired = time.monotonic() - watched_since > EXPIRY_SECONDS
                if holder is None or holder.is_gone(self._me) or expired:
                    self._write()
                    return
            if (holder, count) != first_seen:
                raise LaunchError(
                    f"the run folder {self._path.parent} is in use by {holder}; wait until that run has ended "
                    f"(`keepstep stop {self._path.parent}` stops it), or give this run another name"
                )
            time.sleep(0.5)

    def _renew_until_released(self) -> None:
        while not self._released.wait(RENEW_SECONDS):
            try:
                loss = self._renew()
            except OSError as error:  # such as a full disk; the next attempt may succeed
                log.warning("the lease %s was not renewed: %s", self._path, error)
                continue
            if loss is not None:
                self._on_loss(f"the lease of {self._path.parent} {loss}")
                return

    def _renew(self) -> str | None:
        """Increment the count. Returns None, or how the lease was lost."""
        with _locked(self._path):
            holder, _ = self._holder_and_count()
            if holder != self._me:
                return f"was taken by {holder}" if holder else "was lost: its file is gone"
            self._count += 1
            self._write()
            return None

    def _holder_and_count(self) -> tuple[Holder | None, int]:
        """Content of the lease file; None and 0 if there is none or it cannot be read as a lease."""
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
def _locked(path: Path) -> Generator[None]:
    """Hold a file lock that all processes which share the folder respect."""
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
