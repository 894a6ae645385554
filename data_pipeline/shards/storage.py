"""Bytes of a prepared data set: a local folder, mapped into memory, or any address that fsspec knows, in ranges."""

import logging
import mmap
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data_pipeline.errors import DataError, StorageError

log = logging.getLogger(__name__)

ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 0.2
TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of a file; end null: to its end."""

    file: str
    start: int = 0
    end: int | None = None


class Storage(Protocol):
    address: str
    attempts: int

    def read(self, spans: Sequence[Span]) -> list[bytes | memoryview | Exception]:
        """All at once; an exception in place of what could not be read."""
        ...


class LocalStorage:
    attempts = 1  # the same bytes would come again

    def __init__(self, address: str) -> None:
        self.address = address
        self._maps: dict[str, memoryview] = {}

    def map(self, file: str) -> memoryview:
        """The whole file, read as it is touched."""
        if file not in self._maps:
            with (Path(self.address) / file).open("rb") as opened:
                self._maps[file] = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        return self._maps[file]

    def read(self, spans: Sequence[Span]) -> list[bytes | memoryview | Exception]:
        out: list[bytes | memoryview | Exception] = []
        for span in spans:
            try:
                out.append(_whole(self.map(span.file)[span.start : span.end], span))
            except (OSError, ValueError) as error:
                out.append(error)
        return out


class RemoteStorage:
    attempts = ATTEMPTS

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self.address = address
        options = {}
        if address.startswith(("http://", "https://")):
            import aiohttp

            options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)}
        try:
            self._system, self._path = url_to_fs(address, **options)
        except (ImportError, ValueError) as error:
            raise DataError(f"cannot open {address}: {error}") from error

    def read(self, spans: Sequence[Span]) -> list[bytes | memoryview | Exception]:
        paths = [f"{self._path.rstrip('/')}/{span.file}" for span in spans]
        starts, ends = [span.start for span in spans], [span.end for span in spans]
        try:
            answers = self._system.cat_ranges(paths, starts, ends, on_error="return")
        except Exception as error:  # libraries of object stores raise what they like
            return [error] * len(spans)
        return [_whole(answer, span) for answer, span in zip(answers, spans, strict=True)]


def _whole(answer: bytes | memoryview | Exception, span: Span) -> bytes | memoryview | Exception:
    if isinstance(answer, Exception) or span.end is None or len(answer) == span.end - span.start:
        return answer
    return OSError(f"{len(answer)} bytes came instead of {span.end - span.start}")


def open_storage(address: str) -> LocalStorage | RemoteStorage:
    return RemoteStorage(address) if "://" in address else LocalStorage(address)


def read_checked(
    storages: Sequence[Storage],
    spans: Sequence[Span],
    check: Callable[[int, bytes | memoryview], str | None],
) -> list[bytes | memoryview | DataError]:
    """Each span from the first storage that gives it whole: again with growing pauses, then from the next storage.

    `check(number of the span, bytes)` says what is wrong with them, if anything. What fails everywhere is returned as a
    StorageError if it could not be read, a DataError if it is damaged.
    """
    out: list[bytes | memoryview | DataError] = [DataError("never read")] * len(spans)
    left = list(range(len(spans)))
    for storage in storages:
        for attempt in range(storage.attempts):
            answers = storage.read([spans[number] for number in left])
            for number, answer in zip(left, answers, strict=True):
                out[number] = _judge(storage, spans[number], answer, lambda data, n=number: check(n, data))
            left = [number for number in left if isinstance(out[number], DataError)]
            if not left:
                return out
            if attempt + 1 < storage.attempts:
                pause = FIRST_PAUSE_SECONDS * 2**attempt * (1 + random.random()) / 2
                log.warning("%s; trying again in %.1f s", out[left[0]], pause)
                time.sleep(pause)
    return out


def _judge(
    storage: Storage,
    span: Span,
    answer: bytes | memoryview | Exception,
    check: Callable[[bytes | memoryview], str | None],
) -> bytes | memoryview | DataError:
    where = f"{storage.address}/{span.file}, bytes {span.start} to {'the end' if span.end is None else span.end}"
    if isinstance(answer, Exception):
        return StorageError(f"cannot read {where}: {answer or type(answer).__name__}")
    if (wrong := check(answer)) is not None:
        return DataError(f"{where}: {wrong}")
    return answer
