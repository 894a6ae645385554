"""Documents out of files: jsonl, parquet and plain text, told apart by content.

Text is UTF-8, and nothing else is guessed. Lines end at "\\n" alone, a byte-order mark counts only at the very start,
and memory stays bounded whatever the length of a line. Nothing is dropped in silence: a record without a usable text
comes out with the reason.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import BinaryIO, Literal

from data_pipeline.errors import DataError
from data_pipeline.sources.compression import HEAD_BYTES, READ_BYTES, chunks, kind_of
from data_pipeline.sources.files import HUGGING_FACE, InputFile, Part, open_input
from data_pipeline.sources.records import (
    BLANK,
    NOT_JSON,
    ReadOptions,
    Record,
    decode_piece,
    missing_key,
    text_of_row,
)

_BOM = b"\xef\xbb\xbf"
_PARQUET_MAGIC = b"PAR1"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")


def read_records(file: InputFile, part: Part, options: ReadOptions) -> Iterator[Record]:
    """The records that begin in this part of the file."""
    if file.address.startswith(HUGGING_FACE):
        from data_pipeline.sources.hugging_face import read_hugging_face

        return read_hugging_face(file.address, options)
    return _read_file(file, part, options)


def _read_file(file: InputFile, part: Part, options: ReadOptions) -> Iterator[Record]:
    with open_input(file.address) as opened:
        if part.end is not None or part.start:
            kind = options.format if options.format != "auto" else format_of(opened.read(HEAD_BYTES), file.address)
            if kind == "parquet":
                from data_pipeline.sources.parquet import read_parquet

                yield from read_parquet(opened, file.address, part, options)
                return
            pieces = _lines_that_begin_in(opened, part, options.max_document_bytes)
        else:
            stream = chunks(opened, file.address)
            head = _at_least(stream, HEAD_BYTES)
            kind = options.format if options.format != "auto" else format_of(head, file.address)
            if kind == "parquet":
                if not opened.seekable():
                    raise DataError(f"{file.address}: parquet cannot be read from a stream; copy the file first")
                from data_pipeline.sources.parquet import read_parquet

                yield from read_parquet(opened, file.address, part, options)
                return
            pieces = _pieces(head, stream, kind, file.address, options)
        if kind == "jsonl":
            yield from _read_jsonl(pieces, file.address, options)
        else:
            yield from (decode_piece(piece, file.address, number, options) for number, piece in enumerate(pieces))


def _at_least(stream: Iterator[bytes], size: int) -> bytes:
    head = b""
    for chunk in stream:
        head += chunk
        if len(head) >= size:
            break
    return head


def format_of(head: bytes, name: str) -> Literal["jsonl", "parquet", "text"]:
    """By the first bytes (decompressed). DataError for a JSON array and for UTF-16."""
    if head.startswith(_PARQUET_MAGIC):
        return "parquet"
    if head.startswith(_WIDE_BOMS):
        raise DataError(f"{name} is UTF-16, not UTF-8; convert it: iconv -f utf-16 -t utf-8")
    start = head.removeprefix(_BOM).lstrip()
    named_json = any(ending in PurePosixPath(name).name for ending in (".jsonl", ".ndjson", ".json"))
    if start.startswith(b"[") and start[1:].lstrip().startswith(b"{"):
        raise DataError(
            f"{name} is a JSON array, not one object a line; convert it: jq -c '.[]' (or, if it is text: --format text)"
        )
    if start.startswith(b"{") and (named_json or _is_object(start.split(b"\n", 1)[0])):
        return "jsonl"
    return "text"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode(errors="replace")), dict)
    except ValueError:
        return len(line) > HEAD_BYTES - 1024 and line.startswith(b'{"')


def _pieces(head: bytes, rest: Iterator[bytes], kind: str, name: str, options: ReadOptions) -> Iterator[bytes | None]:
    if head.startswith(_WIDE_BOMS):
        format_of(head, name)  # says what to do
    stream = _chain(head.removeprefix(_BOM), rest)
    if kind == "jsonl":
        return (piece for piece, _ in split(stream, b"\n", options.max_document_bytes))
    if options.separator is not None:
        return (piece for piece, _ in split(stream, options.separator.encode(), options.max_document_bytes))
    return _whole(stream, options.max_document_bytes)


def _chain(head: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    yield head
    yield from rest


def split(stream: Iterable[bytes], separator: bytes, limit: int) -> Iterator[tuple[bytes | None, int]]:
    """Pieces between separators, each with its length and the separator's; None for one longer than `limit`."""
    rest, skipped = b"", 0  # of a piece that is too long, only a possible start of the separator is kept
    for chunk in stream:
        *whole, rest = (rest + chunk).split(separator)
        for piece in whole:
            yield (piece if len(piece) + skipped <= limit else None), skipped + len(piece) + len(separator)
            skipped = 0
        surely = len(rest) - (len(separator) - 1)  # no part of a separator that is still to come
        if surely > 0 and surely + skipped > limit:
            skipped += surely
            rest = rest[surely:]
    if rest or skipped:
        yield (rest if len(rest) + skipped <= limit else None), skipped + len(rest)


def _whole(stream: Iterable[bytes], limit: int) -> Iterator[bytes | None]:
    parts, size = [], 0
    for chunk in stream:
        size += len(chunk)
        if size > limit:
            yield None
            return
        parts.append(chunk)
    yield b"".join(parts)


def _lines_that_begin_in(file: BinaryIO, part: Part, limit: int) -> Iterator[bytes | None]:
    file.seek(max(part.start - 1, 0))
    lines = split(iter(lambda: file.read(READ_BYTES), b""), b"\n", limit)
    position = part.start
    if part.start:  # the line that began before ends here, at the latest with the byte before `start`
        position += next(lines, (None, 1))[1] - 1
    for number, (line, length) in enumerate(lines):
        if part.end is not None and position >= part.end:
            return
        yield line.removeprefix(_BOM) if line is not None and part.start == 0 and number == 0 else line
        position += length


def _read_jsonl(lines: Iterable[bytes | None], name: str, options: ReadOptions) -> Iterator[Record]:
    keys_found: set[str] = set()
    with_key = False
    for number, line in enumerate(lines):
        decoded = decode_piece(line, name, number, options)
        if decoded.text is None:
            yield decoded
            continue
        if not decoded.text.strip():
            yield Record(None, BLANK)
            continue
        try:
            row = json.loads(decoded.text)
        except (ValueError, RecursionError):
            yield Record(None, NOT_JSON)
            continue
        if isinstance(row, dict) and options.text_key not in row:
            keys_found |= row.keys()
        with_key |= isinstance(row, dict) and options.text_key in row
        yield text_of_row(row, options, name, number, decoded.mended)
    if keys_found and not with_key:
        raise missing_key(name, options.text_key, keys_found)


def cuts(file: InputFile, options: ReadOptions, task_bytes: int) -> list[Part] | None:
    """How a large file is read by several tasks: by bytes where records end at newlines, by row groups in parquet."""
    with open_input(file.address) as opened:
        head = opened.read(HEAD_BYTES)
        if kind_of(head) != "plain":
            return None
        kind = options.format if options.format != "auto" else format_of(head, file.address)
        if kind == "parquet":
            from data_pipeline.sources.parquet import parquet_cuts

            return parquet_cuts(opened, file.address, task_bytes)
    if kind == "jsonl" or (kind == "text" and options.separator == "\n"):
        ends = [*range(0, file.size or 0, task_bytes), file.size or 0]
        return [Part(0, start, end) for start, end in itertools.pairwise(ends)]
    return None
