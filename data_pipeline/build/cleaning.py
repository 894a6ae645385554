"""Filters of documents: functions of the text that return the reason to drop it, or None to keep it.

You can write your own in any importable module: `keepstep data build --filter mymodule:my_filter`.
"""

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import cast

import xxhash

from data_pipeline.errors import DataError

Filter = Callable[[str], str | None]

QUALITY = "data_pipeline.build.cleaning:quality"
"""The name of the filter `quality`."""


def content_hash(text: str) -> tuple[int, int]:
    """The 128-bit hash of the text as two 64-bit numbers. In practice, only equal texts have equal hashes."""
    digest = xxhash.xxh3_128_intdigest(text.encode())
    return digest >> 64, digest & ((1 << 64) - 1)


def empty(text: str) -> str | None:
    """The reason to drop text that is only white space."""
    return "empty" if not text.strip() else None


def shorter_than(characters: int) -> Filter:
    """A filter that drops text with fewer characters."""
    return lambda text: "too short" if len(text) < characters else None


def longer_than(characters: int) -> Filter:
    """A filter that drops text with more characters."""
    return lambda text: "too long" if len(text) > characters else None


def quality(text: str) -> str | None:
    """The reason to drop machine-made or broken text in any language: repeated lines, control characters, few letters.

    The thresholds follow the repetition rules of Rae et al., "Scaling language models" (arXiv 2112.11446, table A1),
    without the rules that need English words.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) >= 10:
        repeats = sum(count - 1 for count in Counter(lines).values())
        if repeats > 0.3 * len(lines):
            return "repeated lines"
    control = sum(text.count(chr(code)) for code in (*range(9), *range(14, 32), 0xFFFD))
    if control > 0.01 * len(text):
        return "control characters"
    sample = text[:100_000]
    visible = sum(map(len, sample.split()))
    if visible >= 50 and sum(map(str.isalpha, sample)) < 0.2 * visible:
        return "few letters"
    return None


def load_filter(name: str) -> Filter:
    """The filter named `module:function`. DataError if there is no such function."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"--filter {name}: {error}; give it as module:function") from None
    if not callable(found):
        raise DataError(f"--filter {name} is not a function; name one that takes the text")
    return cast(Filter, found)


def filter_source(name: str) -> str | None:
    """The hash of the source text of the filter's module. None for a filter of Keepstep. DataError as for
    `load_filter`."""
    load_filter(name)
    module = name.partition(":")[0]
    if module.partition(".")[0] == __name__.partition(".")[0]:
        return None
    file = getattr(sys.modules[module], "__file__", None)
    return xxhash.xxh3_128_hexdigest(Path(file).read_bytes()) if file else None
