"""Splits a stream of bytes at separators, in bounded memory and in time that is linear in the size."""

from collections.abc import Iterable, Iterator
from typing import BinaryIO

from data_pipeline.sources.compression import READ_BYTES
from data_pipeline.sources.files import Part
from data_pipeline.sources.formats import BYTE_ORDER_MARK


class _Piece:
    """A piece that is being read. Its bytes are dropped once it is over the limit."""

    def __init__(self, limit: int) -> None:
        self._limit, self._chunks, self.size = limit, list[bytes](), 0

    def add(self, data: bytes) -> None:
        """Adds bytes at the end."""
        self.size += len(data)
        if self.size > self._limit:
            self._chunks.clear()
        elif data:
            self._chunks.append(data)

    def take(self) -> bytes | None:
        """The bytes, or None if there are more than the limit. The next piece begins."""
        out = b"".join(self._chunks) if self.size <= self._limit else None
        self._chunks, self.size = [], 0
        return out


def split(stream: Iterable[bytes], separator: bytes, limit: int) -> Iterator[tuple[bytes | None, int]]:
    """The pieces between separators, each with its length including the separator. A piece over `limit` is None."""
    piece, held = _Piece(limit), b""  # `held` may be the start of a separator
    for chunk in stream:
        *complete, rest = (held + chunk).split(separator)
        for end in complete:
            piece.add(end)
            size = piece.size + len(separator)
            yield piece.take(), size
        settled = max(len(rest) - (len(separator) - 1), 0)
        piece.add(rest[:settled])
        held = rest[settled:]
    piece.add(held)
    if piece.size:
        size = piece.size
        yield piece.take(), size


def join_all(stream: Iterable[bytes], limit: int) -> Iterator[bytes | None]:
    """The entire stream as one piece, or None if it is longer than `limit`."""
    piece = _Piece(limit)
    for chunk in stream:
        piece.add(chunk)
        if piece.size > limit:
            break
    yield piece.take()


def without_carriage_returns(stream: Iterable[bytes]) -> Iterator[bytes]:
    """The stream with LF in place of CRLF. Other carriage returns stay."""
    held = b""
    for chunk in stream:
        data = held + chunk
        held = b"\r" if data.endswith(b"\r") else b""
        yield data.removesuffix(b"\r").replace(b"\r\n", b"\n")
    yield held


def lines_that_begin_in(file: BinaryIO, part: Part, limit: int) -> Iterator[tuple[bytes | None, bool]]:
    """The lines of a seekable file that begin in bytes [part.start, part.end), and whether a newline ends each.

    A line over `limit` is None."""
    position = _first_line(file, part) if part.start else 0
    if position is None:
        return
    file.seek(position)
    lines = split(iter(lambda: file.read(READ_BYTES), b""), b"\n", limit)
    while part.end is None or position < part.end:  # tested first, so that no line after the part is read
        line, length = next(lines, (None, 0))
        if not length:
            return
        ends = line is None or length > len(line)
        yield line.removeprefix(BYTE_ORDER_MARK) if line is not None and position == 0 else line, ends
        position += length


def _first_line(file: BinaryIO, part: Part) -> int | None:
    """The position of the first line that begins in the part; None if none does. Reads no further than the part."""
    position = part.start - 1
    file.seek(position)
    while part.end is None or position < part.end:
        chunk = file.read(READ_BYTES)
        if not chunk:
            return None
        found = chunk.find(b"\n")
        if found >= 0:
            return position + found + 1
        position += len(chunk)
    return None


def lines_before(file: BinaryIO, start: int) -> int:
    """The number of lines that begin before byte `start`."""
    file.seek(0)
    lines, left = int(start > 0), start - 1  # a newline at byte start - 1 begins a line at `start`
    while left > 0 and (chunk := file.read(min(READ_BYTES, left))):
        lines += chunk.count(b"\n")
        left -= len(chunk)
    return lines
