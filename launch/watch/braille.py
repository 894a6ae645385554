"""Curves as text: each character is a braille pattern of 2 x 4 dots. Pure."""

import math
from collections.abc import Sequence

BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of each dot in a braille pattern, by column from the left and row from the top."""


def curve(xs: Sequence[float], ys: Sequence[float], width: int, height: int) -> list[str]:
    """Return the lines of a chart, the highest values first. Points that are not finite are left out.

    Each column of dots is filled between its lowest and its highest value, so that a spike of one step is seen."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
    cells = [[0] * width for _ in range(height)]
    if points:
        low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
        low, high = limits([y for _, y in points])
        columns: dict[int, list[int]] = {}
        for x, y in points:
            column = round((x - low_x) / ((high_x - low_x) or 1.0) * (2 * width - 1))
            columns.setdefault(column, []).append(round((high - y) / (high - low) * (4 * height - 1)))
        for column, rows in columns.items():
            for row in range(min(rows), max(rows) + 1):
                cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    return ["".join(chr(BLANK + bits) for bits in line) for line in cells]


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest finite value, made different."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    return (low, high) if high > low else (low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)
