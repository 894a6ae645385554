"""Checkpoints in an object store, through fsspec: `s3://bucket/run/checkpoints`, `gs://`, `memory://`, ...

A store has no rename: shards go under `step-N/ID/`, and the manifest, written last, makes them count.
"""

import secrets
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import fsspec

from train.checkpoint.format.manifest import MANIFEST
from train.checkpoint.stores.steps import STEP, step_name


class ObjectFolder:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._path = _filesystem(self.url)

    def __str__(self) -> str:
        return self.url

    def size(self, name: str) -> int:
        return self._fs.info(f"{self._path}/{name}")["size"]

    def held(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()  # nothing is open between two requests

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        data = self._fs.cat_file(f"{self._path}/{name}", start=start, end=start + len(out))
        if len(data) != len(out):
            raise OSError(f"{name} ends at byte {start + len(data)}")
        out[:] = data

    def write(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        path = f"{self._path}/{name}"
        self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        with self._fs.open(path, "wb") as file:
            for part in parts:
                file.write(bytes(part))


class ObjectRoot:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._path = _filesystem(self.url)
        self._live: set[str] = set()

    def steps(self) -> list[int]:
        self._fs.invalidate_cache()
        found = self._fs.glob(f"{self._path}/step-*/{MANIFEST}")
        return sorted(int(match[1]) for path in found if (match := STEP.fullmatch(str(path).split("/")[-2])))

    def folder(self, step: int) -> ObjectFolder:
        return ObjectFolder(f"{self.url}/{step_name(step)}")

    def begin(self, step: int) -> str:
        name = f"{step_name(step)}/{secrets.token_hex(4)}"
        self._live.add(name)
        return name

    def attempt(self, name: str) -> ObjectFolder:
        return ObjectFolder(f"{self.url}/{name.split('/')[0]}")

    def prefix(self, attempt: str) -> str:
        return attempt.split("/")[1] + "/"

    def commit(self, attempt: str, step: int, manifest: bytes) -> None:
        self.folder(step).write(MANIFEST, [manifest])
        self._live.discard(attempt)
        for path in self._fs.ls(f"{self._path}/{step_name(step)}", detail=False):  # shards that it replaced
            if str(path).split("/")[-1] not in (attempt.split("/")[1], MANIFEST):
                self._fs.rm(path, recursive=True)

    def abandon(self, attempt: str) -> None:
        self._live.discard(attempt)
        try:
            self._fs.rm(f"{self._path}/{attempt}", recursive=True)
        except Exception:
            return  # it failed to be written, so it may well fail to be removed; `sweep` tries again

    def remove(self, step: int) -> None:
        folder = f"{self._path}/{step_name(step)}"
        try:
            self._fs.rm_file(f"{folder}/{MANIFEST}")  # first, so that it no longer counts
            self._fs.rm(folder, recursive=True)
        except FileNotFoundError:
            return

    def quarantine(self, step: int) -> str:
        folder = f"{self._path}/{step_name(step)}"
        self._fs.mv(f"{folder}/{MANIFEST}", f"{folder}/damaged-{MANIFEST}")
        return f"{self.url}/{step_name(step)}/damaged-{MANIFEST}"

    def quarantined(self) -> list[str]:
        return sorted(self._fs.glob(f"{self._path}/step-*/damaged-{MANIFEST}"))

    def sweep(self) -> list[str]:
        return []  # nobody can tell whether another saver still writes there; a later commit of the step removes it


def _filesystem(url: str) -> tuple[Any, str]:
    fs, path = fsspec.url_to_fs(url)
    return fs, path.rstrip("/")
