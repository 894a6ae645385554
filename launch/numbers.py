"""Types of numeric options: they refuse in one line what the command cannot use, before it does anything."""

import math
from collections.abc import Callable

from train.errors import ConfigError

LARGEST = 2**31 - 1
"""Largest whole number that options take, unless they name another."""


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
