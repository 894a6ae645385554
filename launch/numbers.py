"""Types of numeric options: they refuse in one line what the command cannot use, before it does anything."""

import math
import re
from collections.abc import Callable

from train.errors import ConfigError

LARGEST = 2**31 - 1
"""Largest whole number that options take, unless they name another."""

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""Letters after a count, and what they stand for."""


def whole(option: str, least: int, most: int = LARGEST) -> Callable[[str], int]:
    """Return the argparse type of a whole number from `least` to `most`. ConfigError for any other text."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ConfigError(f"{option} ({text}) must be a whole number from {least} to {most}") from None
        if not least <= value <= most:
            raise ConfigError(f"{option} ({text}) must be at {f'least {least}' if value < least else f'most {most}'}")
        return value

    return parse


def number(option: str, least: float, most: float) -> Callable[[str], float]:
    """Return the argparse type of a finite number from `least` to `most`. ConfigError for any other text."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise ConfigError(f"{option} ({text}) must be a number from {least:g} to {most:g}")
        return value

    return parse


def count(option: str, example: str) -> Callable[[str], float]:
    """Return the argparse type of a large positive number such as 300B. ConfigError for any other text."""

    def parse(text: str) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
        value = float(found[1]) * UNITS[found[2].upper()] if found else 0.0
        if not 0 < value < 1e18:
            raise ConfigError(f"{option} ({text[:200]}) must be a positive number, such as {example}")
        return value

    return parse


def short_count(value: float) -> str:
    """Return a count as people write it, with four digits at most: `950K`, `1.5M`, `70B`."""
    for letter, unit in reversed(UNITS.items()):
        if value >= 0.99995 * unit:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"
