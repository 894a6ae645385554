"""Reads documents from lines of JSON objects."""

import json
from collections.abc import Iterable, Iterator

from data_pipeline.sources.records import (
    ABSENT,
    BLANK,
    NOT_JSON,
    NOT_OBJECT,
    KeysSeen,
    ReadOptions,
    Record,
    decode_piece,
    record_of_value,
    value_at,
)


def read_jsonl(lines: Iterable[bytes | None], name: str, options: ReadOptions, keys: KeysSeen) -> Iterator[Record]:
    """One record per line. Adds to `keys` whether the lines have the text key."""
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
        if not isinstance(row, dict):
            yield Record(None, NOT_OBJECT)
            continue
        value = value_at(row, options.text_key)
        if value is not ABSENT:
            keys.with_text = True
        elif not keys.with_text:
            keys.others |= row.keys()
        yield record_of_value(value, options, name, number, decoded.repaired)
