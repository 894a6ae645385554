"""What every reader of documents gives, and is told: a record is one document, or why there is none."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from data_pipeline.errors import DataError

Format = Literal["auto", "jsonl", "parquet", "text"]


@dataclass(frozen=True)
class ReadOptions:
    format: Format = "auto"
    text_key: str = "text"
    separator: str | None = None
    """Between the documents of a plain text file; null: one document a file."""
    on_error: Literal["strict", "replace"] = "strict"
    """Bytes that are not UTF-8: stop, or put U+FFFD in their place."""
    max_document_bytes: int = 32 << 20
    """Longer documents are dropped."""


class Record(NamedTuple):
    """One document, or why there is none. Records are numbered by their place in the file."""

    text: str | None
    problem: str | None = None
    mended: bool = False


BLANK = "blank line"
MISSING, NULL, NOT_TEXT, NOT_JSON, NOT_OBJECT, TOO_LONG = (
    "no text key",
    "text is null",
    "text is not a string",
    "line is not JSON",
    "line is not a JSON object",
    "longer than the limit",
)


def decode_piece(piece: bytes | None, name: str, number: int, options: ReadOptions) -> Record:
    if piece is None:
        return Record(None, TOO_LONG)
    try:
        return Record(piece.decode())
    except UnicodeDecodeError as error:
        if options.on_error == "strict":
            raise DataError(
                f"{name}, record {number + 1} is not UTF-8 ({error.reason} at byte {error.start}); convert the file, "
                f"or take U+FFFD for what cannot be read: --on-error replace"
            ) from None
        return Record(piece.decode(errors="replace"), mended=True)


def missing_key(name: str, key: str, found: Iterable[str]) -> DataError:
    return DataError(f"no row of {name} has the key {key!r} (found: {', '.join(sorted(found)[:20])}); set --text-key")


def text_of_row(row: Any, options: ReadOptions, name: str, number: int, mended: bool = False) -> Record:
    """The text of a JSON object. Lone surrogates, which JSON can spell, are not text in UTF-8."""
    if not isinstance(row, dict):
        return Record(None, NOT_OBJECT)
    if options.text_key not in row:
        return Record(None, MISSING)
    text = row[options.text_key]
    if text is None:
        return Record(None, NULL)
    if not isinstance(text, str):
        return Record(None, NOT_TEXT)
    if text.isascii():
        return Record(text, mended=mended)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if options.on_error == "strict":
            raise DataError(
                f"{name}, record {number + 1} has a lone surrogate (character {error.start}), which is no text; mend "
                f"it, or take U+FFFD in its place: --on-error replace"
            ) from None
        return Record(text.encode(errors="surrogatepass").decode(errors="replace"), mended=True)
    return Record(text, mended=mended)
