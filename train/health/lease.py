"""A lease that allows one run at a time in a run folder.

The holder writes its identity into a file and increments a count in it every few seconds. A new run that finds a lease
takes it over immediately if the holder is provably gone: a dead process of this host and container, or, elsewhere, an
earlier attempt of the same job. Otherwise the new run watches the count. If the count increases, the holder is alive
and the new run refuses to start. If it does not, the lease has expired. Watching a count needs no synchronized clocks.
"""

import contextlib
import errno
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
from typing import Any

import psutil

from data_pipeline.file_lock import lock_within, open_lock
from data_pipeline.untrusted import read_file
from parallel.errors import LaunchError

log = logging.getLogger(__name__)

RENEW_SECONDS = 3.0
"""Seconds between two increments of the count."""
EXPIRY_SECONDS = 15.0
"""Seconds without an increment after which the lease has expired."""
LOCK_SECONDS = 30.0
"""Longest wait for the lock of the lease, which is held for the time of a read and a write."""
_LARGEST = 1 << 16
"""Bytes that a lease has at most."""
_NOT_OURS = (errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.EACCES, errno.EPERM)
"""Errors of a lock file that is a link, no file, or another user's."""
_KINDS: dict[str, Any] = {
    "id": str, "host": str, "pid": int, "started": int | float, "job": str, "requeues": int, "restarts": int,
    "boot": str, "pid_namespace": str,
}  # fmt: skip
"""Types of the fields of a holder."""


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
    boot: str = ""
    """Random name that the kernel took at its start; machines can share a host name. "" in leases of earlier versions.
    """
    pid_namespace: str = ""
    """The namespace of `pid`: another container on the host may have another process with the same pid."""

    @classmethod
    def this_process(cls, env: Mapping[str, str]) -> "Holder":
        """This process. `env`: its environment, which names the job."""
        job = env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID", "")
        started = psutil.Process().create_time()
        counts = [int(env.get(name) or 0) for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
        job = "" if job == "none" else job
        return cls(
            uuid.uuid4().hex,
            socket.gethostname(),
            os.getpid(),
            started,
            job,
            *counts,
            boot=_boot(),
            pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
        )

    def is_visible(self, me: "Holder") -> bool:
        """Whether the holder's pid means the same process here: the same host, start of the kernel, and container."""
        return self.boot != "" and (self.host, self.boot, self.pid_namespace) == (me.host, me.boot, me.pid_namespace)

    def is_gone(self, me: "Holder") -> bool:
        """Whether the holder has provably ended.

        A holder on another host or in another container may be alive, unless it belongs to an earlier attempt of the
        same job. If both belong to the same attempt, they are two runs within one job, and this one must not take
        over."""
        if not self.is_visible(me):
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
        host, job = (ascii(text[:100])[1:-1] for text in (self.host, self.job))  # a terminal may show them
        return f"process {self.pid} on {host}" + (f", job {job}" if job else "")


def read_lease(path: Path) -> tuple[Holder | None, int]:
    """Return the holder and the count of a lease; None and 0 if there is none, or if the file is no lease."""
    try:
        record: Any = json.loads(read_file(path, limit=_LARGEST))
        holder, count = Holder(**record["holder"]), record["count"]
        right = all(isinstance(getattr(holder, name), kind) for name, kind in _KINDS.items())
        right = right and isinstance(count, int) and 0 < holder.pid < 1 << 31
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None, 0
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ELOOP):  # no regular file, or none of ours
            raise
        return None, 0
    return (holder, count) if right else (None, 0)


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
        try:
            with _locked(self._path):
                if read_lease(self._path)[0] == self._me:
                    self._path.unlink()
        except TimeoutError as error:  # the next run sees that this process is gone
            log.warning("the lease was not removed: %s", error)

    def _acquire(self) -> None:
        watched_since, first_seen = time.monotonic(), read_lease(self._path)
        while True:
            try:
                with _locked(self._path):
                    holder, count = read_lease(self._path)
                    expired = time.monotonic() - watched_since > EXPIRY_SECONDS
                    if holder is None or holder.is_gone(self._me) or expired:
                        self._write()
                        return
            except TimeoutError as error:
                raise LaunchError(f"{error}; end that process, or give this run another name") from None
            except OSError as error:
                if error.errno not in _NOT_OURS:
                    raise
                raise LaunchError(
                    f"the lease cannot be locked: {error}; remove that file, or correct its owner"
                ) from None
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
            holder, _ = read_lease(self._path)
            if holder != self._me:
                return f"was taken by {holder}" if holder else "was lost: its file is gone"
            self._count += 1
            self._write()
            return None

    def _write(self) -> None:
        partial = self._path.with_name(f"{self._path.name}.{self._me.id}")
        partial.write_text(json.dumps({"holder": asdict(self._me), "count": self._count}), encoding="utf-8")
        partial.replace(self._path)


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold a file lock that all processes which share the folder respect.

    TimeoutError if another process holds it for LOCK_SECONDS."""
    file = path.with_name(path.name + ".lock")
    lock = open_lock(file)
    try:
        lock_within(lock, file, LOCK_SECONDS)
        yield
    finally:
        os.close(lock)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
