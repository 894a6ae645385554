"""How often a run breaks, how often it should save, and how much of its time it then trains.

With M the mean time between failures of the whole job, D the stall of a checkpoint and R the time from a failure to the
next step (all in seconds), the best interval between checkpoints is about sqrt(2 D M) (Young 1974), corrected for large
D by Daly (2006, equation 37). The expected time of a unit of work follows from Daly's equation 20.
"""

import math
import random
from dataclasses import dataclass

GPU_HOURS_PER_FAILURE = {
    "llama3": 54 * 24 * 16_384 / 419,
    "rsc-1": 8 * 24 * 1000 / 6.50,
    "rsc-2": 8 * 24 * 1000 / 2.34,
    "opt": 60 * 24 * 992 / 105,
}
"""GPU-hours between failures that interrupt a job, by published fleet: Llama 3 405B, 419 unexpected interruptions of
16,384 H100 in 54 days (arXiv:2407.21783, section 3.3.4); Meta's RSC-1 and RSC-2, 6.50 and 2.34 failures per 1,000
node-days of 8 A100 (arXiv:2410.21680); OPT-175B, about 105 restarts of 992 A100 in two months (arXiv:2205.01068)."""


@dataclass(frozen=True)
class Reliability:
    """What failures and checkpoints do to a run."""

    mean_seconds: float
    """Mean time between failures of the job."""
    interval_seconds: float
    """Best time between checkpoints."""
    goodput: float
    """Share of the time in which the run trains steps that count."""
    failures_per_day: float


def reliability(
    gpus: int, gpu_hours: float, *, stall_seconds: float, save_seconds: float, restart_seconds: float
) -> Reliability:
    """The reliability of a job of `gpus` whose fleet has one failure in `gpu_hours` GPU-hours.

    A checkpoint stops training for `stall_seconds` and is complete `save_seconds` later: a failure before that loses
    them too, so they count as a part of the restart."""
    mean = gpu_hours * 3600 / gpus
    interval = best_interval(stall_seconds, mean)
    share = expected_goodput(interval, stall_seconds, restart_seconds + save_seconds, mean)
    return Reliability(mean, interval, share, 86_400 / mean)


def best_interval(stall_seconds: float, mean_seconds: float) -> float:
    """Seconds of training between checkpoints that lose least (Daly 2006, equation 37)."""
    if stall_seconds >= 2 * mean_seconds:
        return mean_seconds
    ratio = stall_seconds / (2 * mean_seconds)
    return math.sqrt(2 * stall_seconds * mean_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds


def expected_goodput(
    interval_seconds: float, stall_seconds: float, restart_seconds: float, mean_seconds: float
) -> float:
    """Share of time spent on steps that count, failures arriving at random (Daly 2006, equation 20)."""
    exponent = (interval_seconds + stall_seconds) / mean_seconds
    if exponent > 700 or restart_seconds / mean_seconds > 700:
        return 0.0
    needed = mean_seconds * math.exp(restart_seconds / mean_seconds) * math.expm1(exponent)
    return interval_seconds / needed


def simulated_goodput(
    interval_seconds: float,
    stall_seconds: float,
    restart_seconds: float,
    mean_seconds: float,
    *,
    intervals: int,
    seed: int,
) -> float:
    """The same share, from a simulation of `intervals` intervals with failures drawn at random."""
    draw = random.Random(seed)  # not for secrets
    clock, next_failure = 0.0, draw.expovariate(1 / mean_seconds)
    for _ in range(intervals):
        while clock + interval_seconds + stall_seconds > next_failure:
            clock = next_failure
            next_failure = clock + draw.expovariate(1 / mean_seconds)
            while clock + restart_seconds > next_failure:  # a failure while the run restarts
                clock = next_failure
                next_failure = clock + draw.expovariate(1 / mean_seconds)
            clock += restart_seconds
        clock += interval_seconds + stall_seconds
    return intervals * interval_seconds / clock
