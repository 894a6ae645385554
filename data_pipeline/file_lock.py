"""Locks on files that no other user can hold, and that nobody waits for without end."""

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

PAUSE_SECONDS = 0.05
"""Seconds between two tries to take a lock."""


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, which is created if there is none, and which its owner alone can open.

    Whoever can read a file can lock it. OSError if the path is a link or no regular file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "a lock must be a regular file", str(path))
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != 0o600:  # of an earlier version
        os.fchmod(descriptor, 0o600)
    return descriptor


def lock_within(descriptor: int, path: Path, seconds: float) -> None:
    """Take the lock of an open file. TimeoutError, which names the holder, if another process keeps it for so long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{path} is locked by {lock_holder(descriptor)}, which has not released it for {seconds:.0f} s"
                ) from None
        time.sleep(PAUSE_SECONDS)


def lock_holder(descriptor: int) -> str:
    """The processes on this machine that hold the lock of an open file, or `a process elsewhere`."""
    number = str(os.fstat(descriptor).st_ino)
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    held = [line.split() for line in lines if "FLOCK" in line and "->" not in line]
    pids = sorted({words[4] for words in held if words[5].rpartition(":")[2] == number and int(words[4]) > 0})
    return f"process {', '.join(pids)}" if pids else "a process elsewhere"
