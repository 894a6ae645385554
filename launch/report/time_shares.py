"""What the time of a run was spent on, over its life. Pure."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from train.records.goodput import ORDER, Span

WINDOWS = 120
"""Parts into which the life of a run is divided."""


def time_shares(spans: Sequence[Span], windows: int = WINDOWS) -> dict[str, Any]:
    """Return `hours`, the middle of each window since the first start, and `shares`: by kind, the share of each window.

    The seconds of a span are spread evenly over the time that it took."""
    if not spans:
        return {"hours": [], "shares": {}}
    ends = np.array([span.ended for span in spans])
    seconds = np.array([[span.seconds.get(kind, 0.0) for kind in ORDER] for span in spans])
    took = np.maximum(seconds.sum(axis=1), 1e-9)
    first = float((ends - took).min())
    edges = np.linspace(first, max(float(ends.max()), first + 1e-9), windows + 1)
    until = np.array([np.clip((edge - ends + took) / took, 0.0, 1.0) @ seconds for edge in edges])
    spent = np.diff(until, axis=0)
    shares = spent / np.maximum(spent.sum(axis=1, keepdims=True), 1e-12)
    hours = ((edges[1:] + edges[:-1]) / 2 - first) / 3600
    named = {kind: shares[:, column].round(5).tolist() for column, kind in enumerate(ORDER)}
    return {"hours": hours.round(6).tolist(), "shares": {kind: each for kind, each in named.items() if any(each)}}
