"""How far the plan is from published speeds: the error of every row, and whether layouts come in the right order."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.planning.fit import by_release, log_error
from bench.planning.published import Row
from launch.plan.constants import Constants
from launch.plan.machine import Machine, read_machines


@dataclass(frozen=True)
class RowError:
    """The error of one row: (predicted - published) / published tokens per second."""

    row: Row
    was_fitted: bool
    """Whether the constants were fitted on this row."""
    plain: float
    within_release: float | None
    """The error once the median ratio of the *other* rows of its release is taken out; None for a release of one."""


def row_errors(rows: Sequence[Row], constants: Constants, before: str) -> list[RowError]:
    """The errors of all rows; those dated earlier than `before` were fitted."""
    machines = read_machines()
    logs = [log_error(row, machines, constants) for row in rows]
    found = [RowError(row, row.date < before, math.expm1(log), None) for row, log in zip(rows, logs, strict=True)]
    for indices in by_release(rows).values():
        for i in indices if len(indices) > 1 else ():
            scale = statistics.median(logs[j] for j in indices if j != i)
            found[i] = RowError(rows[i], found[i].was_fitted, found[i].plain, math.expm1(logs[i] - scale))
    return found


def summary(errors: Iterable[float]) -> str:
    """Number, median, ninth decile and largest of the absolute errors."""
    sizes = sorted(abs(error) for error in errors)
    if not sizes:
        return "no row"
    ninth = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return f"{len(sizes)} rows, median {statistics.median(sizes):.1%}, 90 % below {ninth:.1%}, worst {sizes[-1]:.0%}"


def order_agreement(rows: Sequence[Row], constants: Constants) -> list[tuple[tuple[str, ...], int, float]]:
    """Kendall's tau between predicted and published speeds of the layouts of one model on one kind of GPU.

    Pairs whose published speeds lie within 2 % count as ties and are left out. Groups of one pair are left out too."""
    machines = read_machines()
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[(row.system, row.date, row.model_name, row.gpu, row.arrangement.precision)].append(row)
    found: list[tuple[tuple[str, ...], int, float]] = []
    for key, members in groups.items():
        signs = list(_signs(members, machines, constants))
        if len(signs) > 1:
            found.append((key, len(signs), sum(signs) / len(signs)))
    return found


def _signs(rows: Sequence[Row], machines: dict[str, Machine], constants: Constants) -> Iterable[int]:
    speeds = [row.tokens_per_second for row in rows]
    predicted = [log_error(row, machines, constants) + math.log(row.tokens_per_second) for row in rows]
    for i, j in itertools.combinations(range(len(rows)), 2):
        if abs(speeds[i] / speeds[j] - 1) > 0.02:
            yield 1 if (speeds[i] > speeds[j]) == (predicted[i] > predicted[j]) else -1
