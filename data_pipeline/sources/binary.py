"""Refuses files that are not text: archives, compressions that are not read, and other binary formats.

Without this, `--on-error replace` would turn them into documents of replacement characters."""

import re
from pathlib import PurePosixPath

from data_pipeline.errors import DataError

_MAGIC: dict[str, tuple[bytes, ...]] = {
    "lz4": (b"\x04\x22\x4d\x18", b"\x02\x21\x4c\x18"),
    "bzip2": (*(b"BZh%d1AY&SY" % level for level in range(1, 10)), *(b"BZh%d\x17rE8" % n for n in range(1, 10))),
    "7z": (b"7z\xbc\xaf\x27\x1c",),
    "zip": (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08"),
    "rar": (b"Rar!\x1a\x07",),
    "lzip": (b"LZIP\x01",),
    "lzop": (b"\x89LZO\x00",),
    "compress (.Z)": (b"\x1f\x9d", b"\x1f\xa0"),
    "lzma": (b"\x5d\x00\x00",),
    "snappy": (b"\xff\x06\x00\x00sNaPpY",),
    "zstd with a dictionary or a skippable frame": tuple(bytes([n]) + b"\x2a\x4d\x18" for n in range(0x50, 0x60)),
    "Arrow IPC": (b"ARROW1", b"FEA1"),
    "ORC": (b"ORC\x0a", b"ORC\x08"),
    "Avro": (b"Obj\x01",),
    "encrypted parquet": (b"PARE",),
    "HDF5": (b"\x89HDF\r\n",),
    "PDF": (b"%PDF-",),
    "SQLite": (b"SQLite format 3\x00",),
    "NumPy": (b"\x93NUMPY",),
    "PNG": (b"\x89PNG\r\n",),
    "JPEG": (b"\xff\xd8\xff",),
    "gzip, inside another compression": (b"\x1f\x8b",),
    "zstd, inside another compression": (b"\x28\xb5\x2f\xfd",),
    "xz, inside another compression": (b"\xfd7zXZ\x00",),
}
_TAR_AT, _TAR = 257, b"ustar"
_NAMES_WITHOUT_MAGIC = {".br": "brotli", ".lzma": "lzma", ".zz": "zlib", ".zlib": "zlib", ".deflate": "deflate"}
"""Ending of the name -> compression whose content begins with no fixed bytes."""
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_MOST_CONTROL = 0.02
"""Share of control bytes that text does not reach. Compressed data have a tenth, UTF-16 has a half."""


def refuse_binary(head: bytes, name: str, *, is_stated: bool) -> None:
    """DataError if a file whose first bytes, decompressed, are `head` cannot be text.

    `is_stated`: the user named the format, so that control characters alone are no reason."""
    kind = _kind_of(head, name)
    if kind is not None:
        raise DataError(
            f"{name} is {kind}, not text; decompress or convert it first (read are: jsonl, parquet and text, plain or "
            f"with gzip, zstd or xz)"
        )
    control = len(_CONTROL.findall(head))
    if control > _MOST_CONTROL * len(head) and not is_stated:
        raise DataError(
            f"{name} is binary: {control:,} of its first {len(head):,} bytes are control characters; decompress or "
            f"convert it first (UTF-16: iconv -t utf-8), or state --format text if it is text"
        )


def _kind_of(head: bytes, name: str) -> str | None:
    if head[_TAR_AT:].startswith(_TAR):
        return "a tar archive"
    for kind, beginnings in _MAGIC.items():
        if head.startswith(beginnings):
            return kind
    return _NAMES_WITHOUT_MAGIC.get(PurePosixPath(name).suffix.lower())
