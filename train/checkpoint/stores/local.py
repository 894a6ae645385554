"""Checkpoints in a file system.

A checkpoint is written to `.step-N.partial-ID`. Every file and folder is fsynced, then one rename makes it `step-N`.
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from data_pipeline.untrusted import open_file
from train.checkpoint.format.manifest import MANIFEST
from train.checkpoint.stores.steps import DEAD_SECONDS, committed_steps, step_name


class LocalFolder:
    """One checkpoint in a folder. See `train.checkpoint.stores.protocol.Folder`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, tuple[int, int]] = {}
        """Descriptor and number of users of each open file, by name."""
        self._lock = Lock()

    def __str__(self) -> str:
        return str(self.path)

    def size(self, name: str) -> int:
        """Size of a file in bytes. OSError if it does not exist."""
        with self.kept_open(name) as descriptor:
            return os.fstat(descriptor).st_size

    @contextmanager
    def kept_open(self, name: str) -> Generator[int]:
        """Keeps a file open for all threads while the context lasts; yields its descriptor."""
        with self._lock:
            descriptor, users = self._open.get(name) or (_open_to_read(self.path, name), 0)
            self._open[name] = descriptor, users + 1
        try:
            yield descriptor
        finally:
            with self._lock:
                descriptor, users = self._open.pop(name)
                if users > 1:
                    self._open[name] = descriptor, users - 1
                else:
                    os.close(descriptor)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on. OSError if the file is too short."""
        with self.kept_open(name) as descriptor:
            done = 0
            while done < len(out):
                count = os.preadv(descriptor, [out[done:]], start + done)
                if not count:
                    raise OSError(f"{name} ends at byte {start + done}")
                done += count

    def write(self, name: str, parts: Iterable[memoryview | bytes | bytearray]) -> None:
        """Write a new file and fsync it and its folder. OSError if the file exists."""
        self.path.mkdir(exist_ok=True)  # rank 0 made it, but a network file system may not show it here yet
        file = self.path / name
        if file.parent != self.path:
            file.parent.mkdir(exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            end = 0
            for part in parts:
                rest = memoryview(part)
                while len(rest):
                    count = os.write(descriptor, rest)
                    # The kernel starts to write now, not at the fsync, and the page cache stays free for the data.
                    os.posix_fadvise(descriptor, end, count, os.POSIX_FADV_DONTNEED)
                    rest, end = rest[count:], end + count
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(file.parent)
        if file.parent != self.path:
            sync_folder(self.path)


class LocalRoot:
    """All checkpoints in a folder. See `train.checkpoint.stores.protocol.Root`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locks: dict[str, int] = {}
        """Descriptor that locks each attempt of this process, by the attempt's name."""

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first."""
        return committed_steps(self.path)

    def folder(self, step: int) -> LocalFolder:
        """The checkpoint of a step."""
        return LocalFolder(self.path / step_name(step))

    def begin(self, step: int) -> str:
        """Make a partial folder and lock it for as long as this process lives; returns its name."""
        self.path.mkdir(parents=True, exist_ok=True)
        name = f".{step_name(step)}.partial-{secrets.token_hex(4)}"
        (self.path / name).mkdir()
        self._locks[name] = _lock(self.path / name)
        return name

    def attempt_folder(self, attempt: str) -> LocalFolder:
        """The partial folder of an attempt."""
        return LocalFolder(self.path / attempt)

    def prefix(self, attempt: str) -> str:
        """Empty: shards and manifest are in one folder."""
        return ""

    def commit(self, attempt: str, step: int, manifest: bytes | bytearray) -> None:
        """Write the manifest and rename the partial folder to `step-N`."""
        self.attempt_folder(attempt).write(MANIFEST, [manifest])
        final = self.path / step_name(step)
        if final.exists():  # a roll-back made the run save this step again; the new checkpoint replaces the old one
            final.rename(self.path / f".{step_name(step)}.replaced-{secrets.token_hex(4)}")
        (self.path / attempt).rename(final)
        sync_folder(self.path)
        os.close(self._locks.pop(attempt))
        for replaced in self.path.glob(f".{step_name(step)}.replaced-*"):
            shutil.rmtree(replaced, ignore_errors=True)

    def abandon(self, attempt: str) -> None:
        """Remove the partial folder of a failed attempt. Never raises."""
        shutil.rmtree(self.path / attempt, ignore_errors=True)
        if attempt in self._locks:
            os.close(self._locks.pop(attempt))

    def remove(self, step: int) -> None:
        """Delete a checkpoint. A rename hides it first, so that no one loads a half-removed checkpoint."""
        doomed = self.path / f".{step_name(step)}.removed-{secrets.token_hex(4)}"
        try:
            (self.path / step_name(step)).rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def quarantine(self, step: int) -> str:
        """Rename a damaged checkpoint to `damaged-step-N-ID`; returns its new path."""
        target = self.path / f"damaged-{step_name(step)}-{secrets.token_hex(4)}"
        (self.path / step_name(step)).rename(target)
        return str(target)

    def quarantined(self) -> list[str]:
        """Paths of all quarantined checkpoints."""
        return sorted(str(path) for path in self.path.glob("damaged-step-*"))

    def sweep(self) -> None:
        """Remove hidden folders that no living process has locked."""
        for entry in sorted(self.path.glob(".step-*.*-*")):
            if entry.name in self._locks or _is_locked(entry):
                continue
            final = self.path / entry.name[1:].split(".")[0]
            if ".replaced-" in entry.name and not final.exists():  # its saver died between the two renames
                entry.rename(final)
                continue
            shutil.rmtree(entry, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that the names in it are durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_to_read(folder: Path, name: str) -> int:
    descriptor = open_file(folder / name, inside=folder)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the kernel reads twice as far ahead
    return descriptor


def _lock(path: Path) -> int:
    """Lock a folder for as long as this process lives; returns the descriptor.

    A network file system may refuse the lock. Then the folder's age decides whether its saver is alive."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass
    return descriptor


def _is_locked(path: Path) -> bool:
    """True if a living saver may still use the folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        return time.time() - path.stat().st_mtime < DEAD_SECONDS
    finally:
        os.close(descriptor)
    return False
