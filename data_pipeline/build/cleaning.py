"""Filters of documents: plain functions of the text that return why to drop it, or None to keep it.

Write your own in any importable module and name it: `keepstep data build --filter mymodule:my_filter`.
"""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import cast

import xxhash

from data_pipeline.errors import DataError

Filter = Callable[[str], str | None]

QUALITY = "data_pipeline.build.cleaning:quality"


def content_hash(text: str) -> tuple[int, int]:
    """128 bits, as two numbers: equal only for equal texts, for all practical purposes."""
    whole = xxhash.xxh3_128_intdigest(text.encode())
    return whole >> 64, whole & ((1 << 64) - 1)


def empty(text: str) -> str | None:
    return "empty" if not text.strip() else None


def shorter_than(characters: int) -> Filter:
    return lambda text: "too short" if len(text) < characters else None


def longer_than(characters: int) -> Filter:
    return lambda text: "too long" if len(text) > characters else None


def quality(text: str) -> str | None:
    """Signs of machine-made or broken text in any language: lines repeated, control characters, hardly any letters.

    The thresholds follow the repetition rules of Rae et al., "Scaling language models" (arXiv 2112.11446, table A1),
    without those that need words of English.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) >= 10:
        repeats = sum(count - 1 for count in Counter(lines).values())
        if repeats > 0.3 * len(lines):
            return "repeated lines"
    strange = sum(text.count(chr(code)) for code in (*range(9), *range(14, 32), 0xFFFD))
    if strange > 0.01 * len(text):
        return "control characters"
    sample = text[:100_000]
    visible = sum(map(len, sample.split()))
    if visible >= 50 and sum(map(str.isalpha, sample)) < 0.2 * visible:
        return "few letters"
    return None


def load_filter(name: str) -> Filter:
    """`module:function`. DataError if there is no such function."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"--filter {name}: {error}; give it as module:function") from None
    if not callable(found):
        raise DataError(f"--filter {name} is not a function of a text")
    return cast(Filter, found)
