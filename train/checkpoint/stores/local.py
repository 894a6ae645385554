"""Checkpoints in a file system, and how one appears all at once.

A checkpoint is written to `.step-N.partial-ID`, every file and folder is fsynced, and a rename makes it `step-N`.
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from train.checkpoint.format.manifest import MANIFEST
from train.checkpoint.stores.steps import committed_steps, step_name

_DEAD_PARTIAL_SECONDS = 24 * 3600.0


class LocalFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: dict[str, tuple[int, int]] = {}
        """By name: the descriptor, and how many use it."""
        self._lock = Lock()

    def __str__(self) -> str:
        return str(self.path)

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    @contextmanager
    def held(self, name: str) -> Iterator[int]:
        with self._lock:
            descriptor, holders = self._held.get(name) or (_open_to_read(self.path / name), 0)
            self._held[name] = descriptor, holders + 1
        try:
            yield descriptor
        finally:
            with self._lock:
                descriptor, holders = self._held.pop(name)
                if holders > 1:
                    self._held[name] = descriptor, holders - 1
                else:
                    os.close(descriptor)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        with self.held(name) as descriptor:
            done = 0
            while done < len(out):
                count = os.preadv(descriptor, [out[done:]], start + done)
                if not count:
                    raise OSError(f"{name} ends at byte {start + done}")
                done += count

    def write(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        self.path.mkdir(exist_ok=True)  # rank 0 made it, but a network file system may not show it here yet
        descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            end = 0
            for part in parts:
                rest = memoryview(part)
                while len(rest):
                    count = os.write(descriptor, rest)
                    # The kernel starts writing now instead of at the fsync, and the page cache is left to the data.
                    os.posix_fadvise(descriptor, end, count, os.POSIX_FADV_DONTNEED)
                    rest, end = rest[count:], end + count
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(self.path)


class LocalRoot:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._locks: dict[str, int] = {}

    def steps(self) -> list[int]:
        return committed_steps(self.path)

    def folder(self, step: int) -> LocalFolder:
        return LocalFolder(self.path / step_name(step))

    def begin(self, step: int) -> str:
        self.path.mkdir(parents=True, exist_ok=True)
        name = f".{step_name(step)}.partial-{secrets.token_hex(4)}"
        (self.path / name).mkdir()
        self._locks[name] = _lock(self.path / name)
        return name

    def attempt(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def prefix(self, attempt: str) -> str:
        return ""

    def commit(self, attempt: str, step: int, manifest: bytes) -> None:
        self.attempt(attempt).write(MANIFEST, [manifest])
        final = self.path / step_name(step)
        if final.exists():  # the same step again, after a roll-back: the new one takes its place
            final.rename(self.path / f".{step_name(step)}.replaced-{secrets.token_hex(4)}")
        (self.path / attempt).rename(final)
        sync_folder(self.path)
        os.close(self._locks.pop(attempt))
        for replaced in self.path.glob(f".{step_name(step)}.replaced-*"):
            shutil.rmtree(replaced, ignore_errors=True)

    def abandon(self, attempt: str) -> None:
        shutil.rmtree(self.path / attempt, ignore_errors=True)
        if attempt in self._locks:
            os.close(self._locks.pop(attempt))

    def remove(self, step: int) -> None:
        """Out of sight by one rename first, so that a half-removed checkpoint is never taken for a whole one."""
        doomed = self.path / f".{step_name(step)}.removed-{secrets.token_hex(4)}"
        try:
            (self.path / step_name(step)).rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def quarantine(self, step: int) -> str:
        target = self.path / f"damaged-{step_name(step)}-{secrets.token_hex(4)}"
        (self.path / step_name(step)).rename(target)
        return str(target)

    def quarantined(self) -> list[str]:
        return sorted(str(path) for path in self.path.glob("damaged-step-*"))

    def sweep(self) -> list[str]:
        swept = []
        for entry in sorted(self.path.glob(".step-*.*-*")):
            if entry.name in self._locks or _held(entry):
                continue
            final = self.path / entry.name[1:].split(".")[0]
            if ".replaced-" in entry.name and not final.exists():  # its saver died between the two renames
                entry.rename(final)
                continue
            shutil.rmtree(entry, ignore_errors=True)
            swept.append(entry.name)
        return swept


def _open_to_read(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the kernel reads twice as far ahead
    return descriptor


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(path: Path) -> int:
    """Hold a folder for as long as this process lives; a network file system may refuse, then its age decides."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass
    return descriptor


def _held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here
        return time.time() - path.stat().st_mtime < _DEAD_PARTIAL_SECONDS
    finally:
        os.close(descriptor)
    return False
