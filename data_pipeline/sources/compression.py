"""Decompresses input files. The compression is detected from the content, never from the name."""

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Literal, cast

import zstandard

from data_pipeline.errors import DataError

InputCompression = Literal["none", "gzip", "zstd", "xz"]
HEAD_BYTES = 1 << 16
READ_BYTES = 1 << 20

_MAGIC: dict[InputCompression, bytes] = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\x00"}
_ZSTD_INPUT_BYTES = 256  # zstd expands by at most 2**15, so one call returns at most 8 MiB


def compression_of(head: bytes) -> InputCompression:
    """The compression of a file that begins with these bytes."""
    for compression, magic in _MAGIC.items():
        if head.startswith(magic):
            return compression
    return "none"


def decompressed(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The decompressed content in chunks. DataError if the file is truncated or damaged."""
    head = file.read(HEAD_BYTES)
    compression = compression_of(head)
    from_start = cast(BinaryIO, _Rejoined(head, file))
    try:
        match compression:
            case "none":
                yield from _read_all(from_start)
            case "gzip":
                yield from _read_all(gzip.GzipFile(fileobj=from_start))
            case "xz":
                yield from _read_all(lzma.LZMAFile(from_start))  # noqa: SIM115 - the caller closes `file`
            case "zstd":
                yield from _zstd_frames(from_start)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError, zlib.error) as error:
        raise DataError(f"{name} is {compression}, but damaged or truncated: {error}; fetch it again") from None


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
    """A file whose first bytes were already read. The file need not be seekable."""

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
