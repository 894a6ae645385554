"""Reads byte ranges of a data set, from a local folder that is mapped into memory or from an fsspec address."""

import logging
import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data_pipeline.credentials import check_address, with_credentials
from data_pipeline.errors import DataError, StorageError
from data_pipeline.untrusted import NotAFileError, TooLargeError, check_size, open_file

log = logging.getLogger(__name__)

ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 0.2
TIMEOUT_SECONDS = 60
_DAMAGE = (FileNotFoundError, NotAFileError, EOFError, ValueError)
"""Errors of a local folder that no second attempt changes: a file is missing, too short, empty, or no file."""


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of a file; `end` None: to the end of the file."""

    file: str
    start: int = 0
    end: int | None = None


class Storage(Protocol):
    """A folder of files, local or remote."""

    address: str
    attempts: int
    """Number of times to try a read that fails."""

    def read(self, spans: Sequence[Span]) -> list[bytes | memoryview | Exception]:
        """The bytes of each span, read in parallel; an exception in place of a span that could not be read."""
        ...

    def size(self, file: str) -> int | None:
        """The size of the file in bytes; None if the storage does not state it."""
        ...


class LocalStorage:
    """A local folder, whose files are mapped into memory."""

    attempts = 1  # a second read would give the same bytes

    def __init__(self, address: str) -> None:
        self.address = address
        self._maps: dict[str, memoryview] = {}

    def map(self, file: str) -> memoryview:
        """The whole file. The system reads a page when it is first accessed."""
        if file not in self._maps:
            descriptor = open_file(Path(self.address) / file, inside=Path(self.address))
            try:
                self._maps[file] = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
            finally:
                os.close(descriptor)
        return self._maps[file]

    def size(self, file: str) -> int | None:
        """The size of the file in bytes; None if it cannot be mapped."""
        try:
            return len(self.map(file))
        except (OSError, ValueError):
            return None

    def read(self, spans: Sequence[Span]) -> list[bytes | memoryview | Exception]:
        """The bytes of each span, or an exception. Views of the maps, not copies."""
        out: list[bytes | memoryview | Exception] = []
        for span in spans:
            try:
                _check_whole(span, len(self.map(span.file)))
                out.append(_complete(self.map(span.file)[span.start : span.end], span))
            except (OSError, ValueError) as error:
                out.append(error)
        return out


class RemoteStorage:
    """An address that fsspec can read, such as s3:// or https://."""

    attempts = ATTEMPTS

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self.address = address
        options = {}
        if address.startswith(("http://", "https://")):
            import aiohttp

            options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)}
        try:
            self._system, self._path = url_to_fs(with_credentials(check_address(address)), **options)
        except (ImportError, ValueError) as error:
            raise DataError(f"cannot open {address}: {error}") from error

    def size(self, file: str) -> int | None:
        """The size of the file in bytes; None if the storage does not state it."""
        try:
            return self._system.size(f"{self._path.rstrip('/')}/{file}")
        except Exception:  # object-store libraries raise many types; `read` reports a file that is missing
            return None

    def read(self, spans: Sequence[Span]) -> list[bytes | memoryview | Exception]:
        """The bytes of each span, or an exception. The requests run in parallel."""
        paths = [f"{self._path.rstrip('/')}/{span.file}" for span in spans]
        starts, ends = [span.start for span in spans], [span.end for span in spans]
        try:
            for span in spans:
                _check_whole(span, self.size(span.file) if span.end is None else None)
            answers = self._system.cat_ranges(paths, starts, ends, on_error="return")
        except Exception as error:  # object-store libraries raise many types
            return [error] * len(spans)
        return [_complete(answer, span) for answer, span in zip(answers, spans, strict=True)]


def _check_whole(span: Span, size: int | None) -> None:
    """TooLargeError if a whole file is asked for, which must be metadata, and it is larger than metadata may be."""
    if span.end is None and size is not None:
        check_size(span.file, size)


def _complete(answer: bytes | memoryview | Exception, span: Span) -> bytes | memoryview | Exception:
    """The answer, or an error if it has fewer bytes than the span."""
    if isinstance(answer, Exception) or span.end is None or len(answer) == span.end - span.start:
        return answer
    return EOFError(f"got {len(answer)} bytes instead of {span.end - span.start}")


def open_storage(address: str) -> LocalStorage | RemoteStorage:
    """The storage at a local path or an address. DataError if fsspec does not know the kind of address."""
    return RemoteStorage(address) if "://" in address else LocalStorage(address)


def read_checked(
    storages: Sequence[Storage],
    spans: Sequence[Span],
    check: Callable[[int, bytes | memoryview], str | None],
) -> list[bytes | memoryview | DataError]:
    """The bytes of each span, from the first storage that has them undamaged.

    A read that fails is tried again with growing pauses, then from the next storage. `check(number of the span, bytes)`
    returns what is wrong with the bytes, or None. A span that fails everywhere is returned as an error: StorageError if
    it could not be read, DataError if it is damaged."""
    out: list[bytes | memoryview | DataError] = [DataError("never read")] * len(spans)
    remaining = list(range(len(spans)))
    for storage in storages:
        for attempt in range(storage.attempts):
            answers = storage.read([spans[number] for number in remaining])
            for number, answer in zip(remaining, answers, strict=True):
                out[number] = _verified(storage, spans[number], answer, lambda data, n=number: check(n, data))
            remaining = [number for number in remaining if isinstance(out[number], DataError)]
            if not remaining:
                return out
            if attempt + 1 < storage.attempts:
                pause = FIRST_PAUSE_SECONDS * 2**attempt * (1 + random.random()) / 2
                log.warning("%s; trying again in %.1f s", out[remaining[0]], pause)
                time.sleep(pause)
    return out


def _verified(
    storage: Storage,
    span: Span,
    answer: bytes | memoryview | Exception,
    check: Callable[[bytes | memoryview], str | None],
) -> bytes | memoryview | DataError:
    """The answer if it passes the check, else an error that names the address and the bytes."""
    where = f"{storage.address}/{span.file}, bytes {span.start} to {'the end' if span.end is None else span.end}"
    if isinstance(answer, Exception):
        is_damage = isinstance(answer, TooLargeError) or (
            isinstance(storage, LocalStorage) and isinstance(answer, _DAMAGE)
        )
        kind = DataError if is_damage else StorageError
        return kind(f"cannot read {where}: {answer or type(answer).__name__}")
    if (wrong := check(answer)) is not None:
        return DataError(f"{where}: {wrong}")
    return answer
