"""Fit the constants of `keepstep plan` on published speeds, in logarithms."""

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from bench.planning.published import Row
from launch.plan.constants import Constants
from launch.plan.machine import Machine, read_machines
from launch.plan.step import step_seconds

LARGEST = 0.5
"""An error above e^0.5 - 1 counts no more: one odd row must not bend the constants."""
ABSOLUTE = 0.05
"""Weight of an error that a release's scale would remove. It keeps the constants near true values."""
PULL = 0.001
"""Weight of a constant's squared distance, in logarithms, from where it started."""
Flat = dict[str, float]


def flatten(constants: Constants) -> Flat:
    """The constants by dotted name."""
    flat: Flat = {}
    for name, value in constants.model_dump(exclude={"measured"}).items():
        flat |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def unflatten(flat: Flat) -> Constants:
    """The inverse of `flatten`."""
    tree: dict[str, dict[str, float] | float] = {}
    for name, value in flat.items():
        head, _, key = name.partition(".")
        if key:
            branch = tree.setdefault(head, {})
            assert isinstance(branch, dict)
            branch[key] = value
        else:
            tree[head] = value
    return Constants.model_validate(tree)


def log_error(row: Row, machines: dict[str, Machine], constants: Constants) -> float:
    """Logarithm of predicted over published tokens per second."""
    seconds = step_seconds(row.model, row.arrangement, machines[row.gpu], constants).total
    speed = row.arrangement.global_batch_size * row.model.seq_len / seconds / row.arrangement.gpus
    return math.log(speed / row.tokens_per_second)


def by_release(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[int]]:
    """Indices of the rows of each release."""
    found: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        found[row.release].append(index)
    return found


def loss(rows: Sequence[Row], constants: Constants, machines: dict[str, Machine]) -> float:
    """Mean error within releases, a release of n rows weighing sqrt(n); plus a little of the error in all."""
    errors = [log_error(row, machines, constants) for row in rows]
    total = weights = 0.0
    for indices in by_release(rows).values():
        middle, weight = statistics.median(errors[i] for i in indices), len(indices) ** -0.5
        for i in indices:
            total += weight * (min(abs(errors[i] - middle), LARGEST) + ABSOLUTE * abs(errors[i]))
            weights += weight
    return total / weights


def fit(rows: Sequence[Row], start: Constants, hops: int, report: Callable[[str], None]) -> Constants:
    """Constants that minimize the loss: first all but the experts' on dense models, then the experts' on the others."""
    experts = [name for name in flatten(start) if name.startswith("expert_")]
    others = [name for name in flatten(start) if name not in experts]
    dense = _fit_some([row for row in rows if row.is_dense], start, others, hops, report)
    return _fit_some([row for row in rows if not row.is_dense], dense, experts, hops, report)


def _fit_some(
    rows: Sequence[Row], start: Constants, names: Sequence[str], hops: int, report: Callable[[str], None]
) -> Constants:
    """The best of several descents of the named constants (basin hopping, Wales and Doye 1997).

    Each descent but the first begins at the best constants so far, all moved at random from a fixed seed."""
    machines, whole = read_machines(), flatten(start)
    begin = {name: whole[name] for name in names}
    draw = random.Random(1)

    def value(candidate: Flat) -> float:
        pull = sum(math.log(candidate[name] / begin[name]) ** 2 for name in begin)
        return loss(rows, unflatten(whole | candidate), machines) + PULL * pull

    best, least = dict(begin), math.inf
    for number in range(hops):
        moved = {name: size * math.exp(draw.gauss(0, 0.2)) if number else size for name, size in best.items()}
        found, reached = _descend(moved, value)
        report(f"descent {number + 1}: loss {reached:.4f}")
        if reached < least:
            best, least = found, reached
    return unflatten(whole | best)


def _descend(flat: Flat, value: Callable[[Flat], float]) -> tuple[Flat, float]:
    """Move one constant after the other while the loss falls, then repeat the sum of the moves (Hooke and Jeeves 1961).

    A round without a gain halves the steps."""
    best, step = value(flat), 0.3
    while step > 0.01:
        before, least = dict(flat), best
        flat, best = _explore(flat, best, step, value)
        again = {name: flat[name] ** 2 / before[name] for name in flat}
        if best < least and (found := value(again)) < best:
            flat, best = again, found
        if best > least - 1e-4:
            step /= 2
    return flat, best


def _explore(flat: Flat, best: float, step: float, value: Callable[[Flat], float]) -> tuple[Flat, float]:
    for name in flat:
        for factor in (math.exp(step), math.exp(-step)):
            candidate = flat | {name: flat[name] * factor}
            while (found := value(candidate)) < best:
                best, flat = found, candidate
                candidate = flat | {name: flat[name] * factor}
    return flat, best
