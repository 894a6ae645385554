"""JSON as text that `json.dumps` would not write: repeated keys, infinite numbers, bytes that are not UTF-8."""

import json
from dataclasses import dataclass
from typing import Any

NESTED = 100_000
"""Levels of a value that is nested too deeply."""


class Raw(str):
    """Text that stands in a document as it is. Lone surrogates stand for bytes (`surrogateescape`)."""

    __slots__ = ()


@dataclass(frozen=True)
class Pairs:
    """An object as its pairs, so that a key can be repeated."""

    pairs: list[tuple[Any, Any]]


def dumps(value: Any, separators: tuple[str, str] = (",", ":")) -> bytes:
    """The bytes of a tree of plain values, `Raw` and `Pairs`."""
    return _text(value, *separators).encode("utf-8", "surrogateescape")


def _text(value: Any, comma: str, colon: str) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict | Pairs):
        pairs = value.items() if isinstance(value, dict) else value.pairs
        inner = (_key(key) + colon + _text(item, comma, colon) for key, item in pairs)
        return "{" + comma.join(inner) + "}"
    if isinstance(value, list | tuple):
        return "[" + comma.join(_text(item, comma, colon) for item in value) + "]"
    return json.dumps(value)


def _key(key: Any) -> str:
    return str(key) if isinstance(key, Raw) else json.dumps(str(key))
