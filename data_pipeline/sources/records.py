"""What readers take and return: options in, records out. A record is one document, or the reason why it has no text."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from data_pipeline.errors import DataError

Format = Literal["jsonl", "parquet", "text"]


@dataclass(frozen=True)
class ReadOptions:
    """How documents are read from input files."""

    format: Literal["auto"] | Format = "auto"
    """Format of every input file; "auto": detected from the name and the content of each file."""
    text_key: str = "text"
    """Key in jsonl, or column in parquet, that contains the text. Dots lead into objects and lists: `meta.texts.0`."""
    text_keys: tuple[tuple[str, str], ...] = ()
    """(pattern, key): other text keys for the files whose address matches the pattern, see `for_file`."""
    separator: str | None = None
    """String between the documents of a plain text file; None: one document per file."""
    keep_carriage_returns: bool = False
    """Whether lines of plain text keep their CR before LF; otherwise CRLF is read as LF."""
    on_error: Literal["strict", "replace"] = "strict"
    """Action for bytes that are not UTF-8: stop, or replace them by U+FFFD."""
    max_document_bytes: int = 32 << 20
    """Size limit in bytes; longer documents are dropped."""

    def for_file(self, address: str) -> "ReadOptions":
        """The options for one file. The last pattern that matches its address decides its text key."""
        keys = [key for pattern, key in self.text_keys if matches(pattern, address)]
        return replace(self, text_key=keys[-1], text_keys=()) if keys else self


def matches(pattern: str, address: str) -> bool:
    """Whether the pattern is the address, a folder above it, or a glob for it (`*` matches any characters)."""
    return address == pattern or address.startswith(pattern.rstrip("/") + "/") or fnmatchcase(address, pattern)


class Record(NamedTuple):
    """One document, or the reason why it has no usable text. Its number is its position in the file."""

    text: str | None
    problem: str | None = None
    repaired: bool = False
    """Whether invalid characters were replaced by U+FFFD."""


BLANK = "blank line"
MISSING, NULL, NOT_TEXT, NOT_JSON, NOT_OBJECT, TOO_LONG = (
    "no text key",
    "text is null",
    "text is not a string",
    "line is not JSON",
    "line is not a JSON object",
    "longer than the limit",
)


class RecordError(DataError):
    """A record of a file that cannot be read. Records are numbered from 0 here, and from 1 in the message."""

    def __init__(self, name: str, number: int, problem: str) -> None:
        super().__init__(name, number, problem)  # the arguments of all its copies in other processes

    def __str__(self) -> str:
        name, number, problem = self.args
        return f"{name}, record {number + 1} {problem}"

    def after(self, records: int) -> "RecordError":
        """The same error, if so many records come before the part of the file that was read."""
        name, number, problem = self.args
        return RecordError(name, number + records, problem)


@dataclass
class KeysSeen:
    """Whether rows had the text key, and the keys of the rows that did not. Several parts of a file are added up."""

    with_text: bool = False
    others: set[str] = field(default_factory=set[str])

    def add(self, other: "KeysSeen") -> None:
        """Adds what was seen in another part of the file."""
        self.with_text |= other.with_text
        self.others |= other.others

    def check(self, name: str, key: str) -> None:
        """DataError if rows had keys, but none had the text key."""
        if self.others and not self.with_text:
            raise missing_key(name, key, self.others)


_ENCODED_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def decode_piece(piece: bytes | None, name: str, number: int, options: ReadOptions) -> Record:
    """The record of UTF-8 bytes. None stands for a document over the size limit. DataError if not UTF-8 ("strict")."""
    if piece is None:
        return Record(None, TOO_LONG)
    try:
        return Record(piece.decode())
    except UnicodeDecodeError as error:
        if options.on_error == "strict":
            problem = (
                f"is not UTF-8 ({error.reason} at byte {error.start}); convert the file, or replace invalid bytes by "
                f"U+FFFD: --on-error replace"
            )
            raise RecordError(name, number, problem) from None
        whole = _ENCODED_SURROGATE.sub("\ufffd".encode(), piece)  # one replacement for each, not one for each byte
        return Record(whole.decode(errors="replace"), repaired=True)


def missing_key(name: str, key: str, found: Iterable[str]) -> DataError:
    """The error for a file in which no row has the text key."""
    keys = ", ".join(sorted(found)[:20])
    return DataError(f"no row of {name} has the key {key!r} (found: {keys}); set --text-key (nested: --text-key a.b)")


ABSENT = object()
"""What `value_at` returns if there is no such key."""


def value_at(row: Any, key: str) -> Any:
    """The value of the key, or at the path that its dots describe through objects and lists; ABSENT if none."""
    if isinstance(row, Mapping) and key in row:
        return row[key]
    value = row
    for step in key.split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return ABSENT
    return value


def record_of_row(row: Any, options: ReadOptions, name: str, number: int, repaired: bool = False) -> Record:
    """The record of a parsed JSON value.

    DataError ("strict") for a lone surrogate, which JSON can spell and UTF-8 cannot."""
    if not isinstance(row, dict):
        return Record(None, NOT_OBJECT)
    return record_of_value(value_at(row, options.text_key), options, name, number, repaired)


def record_of_value(text: Any, options: ReadOptions, name: str, number: int, repaired: bool = False) -> Record:
    """The record of the value at the text key, or of ABSENT. DataError as for `record_of_row`."""
    if text is ABSENT:
        return Record(None, MISSING)
    if text is None:
        return Record(None, NULL)
    if not isinstance(text, str):
        return Record(None, NOT_TEXT)
    if text.isascii():
        return Record(text, repaired=repaired)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if options.on_error == "strict":
            problem = (
                f"has a lone surrogate (character {error.start}), which UTF-8 cannot encode; correct the file, or "
                f"replace it by U+FFFD: --on-error replace"
            )
            raise RecordError(name, number, problem) from None
        return Record(_SURROGATE.sub("\ufffd", text), repaired=True)
    return Record(text, repaired=repaired)
