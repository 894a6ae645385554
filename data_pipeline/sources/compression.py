"""Bytes of a file, decompressed if they are compressed: by what the file holds, never by its name."""

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Literal, cast

import zstandard

from data_pipeline.errors import DataError

Kind = Literal["plain", "gzip", "zstd", "xz"]
HEAD_BYTES = 1 << 16
READ_BYTES = 1 << 20

_MAGIC: dict[Kind, bytes] = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\x00"}
_ZSTD_INPUT_BYTES = 256  # what comes out at once is at most 2**15 times as much: 8 MiB


def kind_of(head: bytes) -> Kind:
    for kind, magic in _MAGIC.items():
        if head.startswith(magic):
            return kind
    return "plain"


def chunks(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The decompressed content in pieces. DataError if it is cut short or damaged."""
    head = file.read(HEAD_BYTES)
    kind = kind_of(head)
    whole = cast(BinaryIO, _Rejoined(head, file))
    try:
        match kind:
            case "plain":
                yield from _read_all(whole)
            case "gzip":
                yield from _read_all(gzip.GzipFile(fileobj=whole))
            case "xz":
                yield from _read_all(lzma.LZMAFile(whole))  # noqa: SIM115 - the caller closes what is below
            case "zstd":
                yield from _zstd_frames(whole)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError, zlib.error) as error:
        raise DataError(f"{name} is {kind}, but damaged or cut short: {error}; fetch it again") from None


def _read_all(file: BinaryIO | gzip.GzipFile | lzma.LZMAFile) -> Iterator[bytes]:
    while chunk := file.read(READ_BYTES):
        yield chunk


def _zstd_frames(file: BinaryIO) -> Iterator[bytes]:
    decompressor = None
    while data := file.read(_ZSTD_INPUT_BYTES):
        while data:
            decompressor = decompressor or zstandard.ZstdDecompressor().decompressobj()
            if out := decompressor.decompress(data):
                yield out
            data = decompressor.unused_data
            if decompressor.eof:
                decompressor = None
    if decompressor is not None:
        raise EOFError("the last frame has no end")


class _Rejoined(io.RawIOBase):
    """A file whose first bytes were read already. It need not be seekable."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._head:
            if size < 0:
                out, self._head = self._head + self._rest.read(), b""
            else:
                out, self._head = self._head[:size], self._head[size:]
            return out
        return self._rest.read(size)
