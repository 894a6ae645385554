"""Counters of the rows used: per source and epoch, their number and the sum of their hashes.

A run keeps them, and an audit compares them with the plan.
"""

from collections import defaultdict

import numpy as np

from data_pipeline.stream.mixture import Samples
from data_pipeline.stream.order import mix

Counts = dict[tuple[int, int], tuple[int, int]]
"""(source, epoch) -> (rows, sum of the rows' hashes modulo 2**64)."""

_MODULUS = 1 << 64


def count(samples: Samples) -> Counts:
    """The counters of these samples."""
    hashes = mix(samples.row.astype(np.uint64) + np.uint64(1))
    out: Counts = {}
    for source in np.unique(samples.source).tolist():
        of_source = samples.source == source
        for epoch in np.unique(samples.epoch[of_source]).tolist():
            chosen = of_source & (samples.epoch == epoch)
            out[source, epoch] = int(chosen.sum()), int(hashes[chosen].sum())
    return out


def add(*several: Counts) -> Counts:
    """The sum of the counters."""
    total: defaultdict[tuple[int, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for counts in several:
        for key, (rows, hashes) in counts.items():
            before = total[key]
            total[key] = before[0] + rows, (before[1] + hashes) % _MODULUS
    return dict(sorted(total.items()))


def to_json(counts: Counts) -> list[list[int]]:
    """The counters as lists: source, epoch, rows, sum of hashes."""
    return [[*key, *value] for key, value in sorted(counts.items())]


def from_json(rows: list[list[int]]) -> Counts:
    """The counters that `to_json` wrote."""
    return {(source, epoch): (number, hashes) for source, epoch, number, hashes in rows}
