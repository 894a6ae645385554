"""Checkpoints in an object store, through fsspec: `s3://bucket/run/checkpoints`, `gs://`, `memory://`, ...

An object store has no rename. Shards go to `step-N/ID/`; the manifest, written last, commits the checkpoint.
"""

import logging
import math
import secrets
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import fsspec  # pyright: ignore[reportMissingTypeStubs]

from data_pipeline.credentials import check_address, with_credentials
from train.checkpoint.format.manifest import MANIFEST
from train.checkpoint.stores.steps import DEAD_SECONDS, STEP, step_name
from train.errors import CheckpointError

log = logging.getLogger(__name__)


class ObjectFolder:
    """One checkpoint at a URL. See `train.checkpoint.stores.protocol.Folder`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._path = _filesystem(self.url)

    def __str__(self) -> str:
        return self.url

    def size(self, name: str) -> int:
        """Size of an object in bytes. OSError if it does not exist."""
        return self._fs.info(f"{self._path}/{name}")["size"]

    def kept_open(self, name: str) -> AbstractContextManager[None]:
        """Does nothing: each request opens the object anew."""
        return nullcontext()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on. OSError if the object is too short."""
        data = self._fs.cat_file(f"{self._path}/{name}", start=start, end=start + len(out))
        if len(data) != len(out):
            raise OSError(f"{name} ends at byte {start + len(data)}")
        out[:] = data

    def write(self, name: str, parts: Iterable[memoryview | bytes | bytearray]) -> None:
        """Upload an object. It is durable when the call returns."""
        path = f"{self._path}/{name}"
        self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        with self._fs.open(path, "wb") as file:
            for part in parts:
                file.write(bytes(part))


class ObjectRoot:
    """All checkpoints at a URL. See `train.checkpoint.stores.protocol.Root`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._path = _filesystem(self.url)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that have a manifest, oldest first."""
        self._fs.invalidate_cache()
        found = self._fs.glob(f"{self._path}/step-*/{MANIFEST}")
        return sorted(int(match[1]) for path in found if (match := STEP.fullmatch(str(path).split("/")[-2])))

    def folder(self, step: int) -> ObjectFolder:
        """The checkpoint of a step."""
        return ObjectFolder(f"{self.url}/{step_name(step)}")

    def begin(self, step: int) -> str:
        """A new attempt, `step-N/ID`. Nothing is written yet."""
        return f"{step_name(step)}/{secrets.token_hex(4)}"

    def attempt_folder(self, attempt: str) -> ObjectFolder:
        """The folder `step-N`; the names of this attempt's shards begin with `prefix(attempt)`."""
        return ObjectFolder(f"{self.url}/{attempt.split('/')[0]}")

    def prefix(self, attempt: str) -> str:
        """`ID/`, the folder of this attempt's shards."""
        return attempt.split("/")[1] + "/"

    def commit(self, attempt: str, step: int, manifest: bytes | bytearray) -> None:
        """Write the manifest, then remove the shards that this attempt replaces."""
        self.folder(step).write(MANIFEST, [manifest])
        for path in self._fs.ls(f"{self._path}/{step_name(step)}", detail=False):
            if str(path).split("/")[-1] not in (attempt.split("/")[1], MANIFEST):
                self._fs.rm(path, recursive=True)

    def abandon(self, attempt: str) -> None:
        """Remove the shards of a failed attempt. Never raises."""
        try:
            self._fs.rm(f"{self._path}/{attempt}", recursive=True)
        except Exception:
            return  # the store failed the save, so it may fail the removal; a later commit of this step tries again

    def remove(self, step: int) -> None:
        """Delete a checkpoint, its manifest first, so that no one loads a half-removed checkpoint."""
        folder = f"{self._path}/{step_name(step)}"
        try:
            self._fs.rm_file(f"{folder}/{MANIFEST}")
            self._fs.rm(folder, recursive=True)
        except FileNotFoundError:
            return

    def quarantine(self, step: int) -> str:
        """Rename the manifest of a damaged checkpoint to `damaged-manifest.json`; returns its URL."""
        folder = f"{self._path}/{step_name(step)}"
        self._fs.mv(f"{folder}/{MANIFEST}", f"{folder}/damaged-{MANIFEST}")
        return f"{self.url}/{step_name(step)}/damaged-{MANIFEST}"

    def quarantined(self) -> list[str]:
        """Locations of the renamed manifests of all quarantined checkpoints."""
        return sorted(self._fs.glob(f"{self._path}/step-*/damaged-{MANIFEST}"))

    def sweep(self) -> None:
        """Remove the shards of attempts that were never committed, if nothing was written to their step for a day.

        Never raises: a store that does not tell the age of its objects keeps them."""
        try:
            committed = {step_name(step) for step in self.steps()}
            for folder in self._fs.ls(self._path, detail=False) if self._fs.isdir(self._path) else ():
                name = str(folder).rstrip("/").split("/")[-1]
                if STEP.fullmatch(name) and name not in committed and self._is_dead(folder):
                    self._fs.rm(folder, recursive=True)
        except Exception as error:  # object stores raise errors of many types
            log.warning("abandoned checkpoints in %s could not be removed: %s", self.url, error)

    def _is_dead(self, folder: str) -> bool:
        """Whether a folder has nothing but shards of attempts, and all of them are old."""
        files = [str(path) for path in self._fs.find(folder)]
        if any(path.endswith(MANIFEST) for path in files):  # in quarantine, or committed in this moment
            return False
        newest = max((self._fs.modified(path).timestamp() for path in files), default=math.inf)
        return time.time() - newest > DEAD_SECONDS


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        address = with_credentials(check_address(url))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    found: tuple[Any, str] = fsspec.url_to_fs(address)  # pyright: ignore
    return found[0], found[1].rstrip("/")
