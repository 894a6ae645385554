"""Detects the format of an input file from its name and its first bytes."""

import json
from pathlib import PurePosixPath

from data_pipeline.errors import DataError
from data_pipeline.sources.binary import refuse_binary
from data_pipeline.sources.compression import HEAD_BYTES
from data_pipeline.sources.records import Format, ReadOptions

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PARQUET_MAGIC = b"PAR1"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_JSON_LINES = (".jsonl", ".ndjson")
_JSON = (*_JSON_LINES, ".json")


def chosen_format(head: bytes, name: str, options: ReadOptions) -> Format:
    """The format that the options state, or the detected one. DataError if the file cannot be read as text."""
    if options.format == "auto":
        return detect_format(head, name)
    if options.format != "parquet":
        _refuse_utf16(head, name)
        refuse_binary(head, name, is_stated=True)
    return options.format


def detect_format(head: bytes, name: str) -> Format:
    """The format of a file whose first bytes, decompressed, are `head`.

    A file named .jsonl or .ndjson is jsonl, whatever its first line is. Otherwise a file is jsonl if its first line or
    most of its lines are JSON objects. DataError for a JSON array, UTF-16 and binary files."""
    if head.startswith(_PARQUET_MAGIC):
        return "parquet"
    _refuse_utf16(head, name)
    refuse_binary(head, name, is_stated=False)
    endings = {ending.lower() for ending in PurePosixPath(name).suffixes}
    if ".parquet" in endings:
        raise DataError(f"{name} is named .parquet, but does not begin like parquet; fetch it again or rename it")
    start = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if start.startswith(b"[") and start[1:].lstrip().startswith(b"{"):
        raise DataError(
            f"{name} is a JSON array, not one object per line; convert it: jq -c '.[]' (or, if it is text: "
            f"--format text)"
        )
    if endings & set(_JSON_LINES) or (start.startswith(b"{") and endings & set(_JSON)):
        return "jsonl"
    lines = [line for line in start.split(b"\n") if line.strip()]
    if len(head) >= HEAD_BYTES and len(lines) > 1:
        lines.pop()  # its end is not in the head
    objects = [_is_object(line) for line in lines]
    return "jsonl" if objects and (objects[0] or 2 * sum(objects) > len(objects)) else "text"


def _refuse_utf16(head: bytes, name: str) -> None:
    if head.startswith(_UTF16_MARKS):
        raise DataError(f"{name} is UTF-16, not UTF-8; convert it: iconv -f utf-16 -t utf-8")


def _is_object(line: bytes) -> bool:
    """Whether a line is a JSON object, or the beginning of one that is longer than the head."""
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line.decode(errors="replace")), dict)
    except (ValueError, RecursionError):
        return len(line) > HEAD_BYTES - 1024 and line.startswith(b'{"')
