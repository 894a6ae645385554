import gzip
import io
import lzma
from collections.abc import Callable

import pytest
import zstandard

from data_pipeline.errors import DataError
from data_pipeline.sources.compression import compression_of, decompressed

TEXT = b"".join(b"line %d of some text\n" % number for number in range(20_000))
HALF = len(TEXT) // 2


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd, "xz": lzma.compress}


def read(data: bytes) -> bytes:
    return b"".join(decompressed(io.BytesIO(data), "a-file"))


def test_uncompressed_bytes_are_unchanged() -> None:
    assert read(TEXT) == TEXT
    assert read(b"") == b""


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_compression_is_detected_by_content(kind: str) -> None:
    assert compression_of(COMPRESSORS[kind](TEXT)) == kind
    assert read(COMPRESSORS[kind](TEXT)) == TEXT


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_all_members_of_a_file_are_read(kind: str) -> None:
    compress = COMPRESSORS[kind]
    assert read(compress(TEXT[:HALF]) + compress(b"") + compress(TEXT[HALF:])) == TEXT


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_a_truncated_file_is_named(kind: str) -> None:
    with pytest.raises(DataError, match=f"a-file is {kind}, but damaged or truncated: .*fetch it again"):
        read(COMPRESSORS[kind](TEXT)[:-20])


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_a_damaged_file_is_named(kind: str) -> None:
    data = bytearray(COMPRESSORS[kind](TEXT))
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    with pytest.raises(DataError, match=f"a-file is {kind}, but damaged"):
        read(bytes(data))


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_content_that_expands_a_lot_comes_in_chunks(kind: str) -> None:
    data = COMPRESSORS[kind](bytes(64 << 20))
    sizes = [len(chunk) for chunk in decompressed(io.BytesIO(data), "a-file")]
    assert sum(sizes) == 64 << 20
    assert max(sizes) <= 8 << 20
