"""Reads documents from files of any supported kind: jsonl, parquet, plain text and Hugging Face data sets.

Text is UTF-8; no other encoding is guessed. Lines end at "\\n" or "\\r\\n", a byte-order mark counts only at the very
start, and memory is bounded whatever the length of a line. Nothing is dropped silently: a record without usable text
carries the reason.
"""

import itertools
from collections.abc import Iterator
from typing import BinaryIO

from data_pipeline.errors import DataError
from data_pipeline.sources.compression import HEAD_BYTES, compression_of, decompressed
from data_pipeline.sources.files import InputFile, Part, open_input
from data_pipeline.sources.formats import BYTE_ORDER_MARK, chosen_format
from data_pipeline.sources.hugging_face import is_hugging_face, read_hugging_face
from data_pipeline.sources.jsonl import read_jsonl
from data_pipeline.sources.records import Format, KeysSeen, ReadOptions, Record, RecordError, decode_piece
from data_pipeline.sources.splitting import join_all, lines_before, lines_that_begin_in, split, without_carriage_returns


def read_records(file: InputFile, part: Part, options: ReadOptions, keys: KeysSeen | None = None) -> Iterator[Record]:
    """The records that begin in this part of the file, in order. DataError if the file cannot be read as text.

    `keys` learns whether rows have the text key. A whole file without it is refused here; for the parts of a file, the
    caller adds up `keys` and calls its `check`."""
    options = options.for_file(file.address)
    if is_hugging_face(file.address):
        return read_hugging_face(file.address, options)
    return _read_file(file.address, part, options, KeysSeen() if keys is None else keys)


def _read_file(address: str, part: Part, options: ReadOptions, keys: KeysSeen) -> Iterator[Record]:
    with open_input(address) as file:
        stream = decompressed(file, address) if part.is_whole_file else iter([file.read(HEAD_BYTES)])
        head = _at_least(stream, HEAD_BYTES)
        kind = chosen_format(head, address, options)
        if kind == "parquet":
            yield from _read_parquet(file, address, part, options)
            return
        if part.is_whole_file:
            pieces = _pieces(itertools.chain([head.removeprefix(BYTE_ORDER_MARK)], stream), kind, options)
        else:
            pieces = _lines(file, part, kind, options)
        try:
            if kind == "jsonl":
                yield from read_jsonl(pieces, address, options, keys)
            else:
                yield from (decode_piece(piece, address, number, options) for number, piece in enumerate(pieces))
        except RecordError as error:
            raise error.after(lines_before(file, part.start) if part.start else 0) from None
        if part.is_whole_file:
            keys.check(address, options.text_key)


def _at_least(stream: Iterator[bytes], size: int) -> bytes:
    """The first chunks of the stream, at least `size` bytes of them, or all if there are fewer."""
    head = b""
    for chunk in stream:
        head += chunk
        if len(head) >= size:
            break
    return head


def _read_parquet(file: BinaryIO, address: str, part: Part, options: ReadOptions) -> Iterator[Record]:
    if not file.seekable():
        raise DataError(f"{address}: parquet cannot be read from a stream; copy the file to a disk first")
    from data_pipeline.sources.parquet import read_parquet

    return read_parquet(file, address, part, options)


def _pieces(stream: Iterator[bytes], kind: Format, options: ReadOptions) -> Iterator[bytes | None]:
    """The bytes of each record of a whole file."""
    if kind == "jsonl":
        return (piece for piece, _ in split(stream, b"\n", options.max_document_bytes))
    separator = options.separator
    if not options.keep_carriage_returns:
        stream = without_carriage_returns(stream)
        separator = separator.replace("\r\n", "\n") if separator is not None else None
    if separator is None:
        return join_all(stream, options.max_document_bytes)
    return (piece for piece, _ in split(stream, separator.encode(), options.max_document_bytes))


def _lines(file: BinaryIO, part: Part, kind: Format, options: ReadOptions) -> Iterator[bytes | None]:
    """The bytes of each line that begins in the part."""
    strip = kind == "text" and not options.keep_carriage_returns
    for line, ends in lines_that_begin_in(file, part, options.max_document_bytes):
        yield line.removesuffix(b"\r") if strip and ends and line is not None else line


def cut_file(file: InputFile, options: ReadOptions, part_bytes: int) -> list[Part] | None:
    """Parts of a large file that can be read independently; None if it must be read as a whole.

    Parquet is cut at row groups, other formats at bytes if their records end at newlines."""
    with open_input(file.address) as opened:
        head = opened.read(HEAD_BYTES)
        if compression_of(head) != "none":
            return None
        kind = chosen_format(head, file.address, options)
        if kind == "parquet":
            from data_pipeline.sources.parquet import cut_parquet

            return cut_parquet(opened, file.address, part_bytes)
    is_line = options.separator == "\n" or (options.separator == "\r\n" and not options.keep_carriage_returns)
    if kind == "jsonl" or is_line:
        ends = [*range(0, file.size or 0, part_bytes), file.size or 0]
        return [Part(0, start, end) for start, end in itertools.pairwise(ends)]
    return None
