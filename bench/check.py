"""Checks that a training step has not become slower: `python -m bench.check`.

Keepstep, a plain loop and the bare matrix products take turns on this machine. Keepstep's speed relative to each of the
two is compared with `bench/recorded.json`. The check fails if a ratio fell by more than the noise stated there.
`--record` replaces the recorded ratios.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from bench.step import LIMIT, MICRO_BATCH, MODELS, contenders, measure

RECORDED = Path(__file__).with_name("recorded.json")
OURS, OTHERS = "keepstep single", (LIMIT, "nanogpt, compiled")
NOISE = 0.15
"""Largest relative difference of a ratio between two runs on one machine."""


def measured_ratios(rounds: int) -> dict[str, float]:
    """Keepstep's speed relative to each of the others, in processor seconds."""
    entrants = [one for one in contenders(sys.executable, [], 1) if one.name in (OURS, *OTHERS)]
    measure(entrants, {**MODELS["14M"], "micro_batch_size": MICRO_BATCH["14M"]}, rounds, steps=2)
    by_name = {one.name: one.processor for one in entrants}
    ours = by_name.pop(OURS)
    return {
        name: statistics.median(a / b for a, b in zip(theirs, ours, strict=True)) for name, theirs in by_name.items()
    }


def regressions(recorded: dict[str, float], measured: dict[str, float], noise: float) -> list[str]:
    """One sentence for each ratio that fell by more than the noise."""
    return [
        f"against {name}: {measured[name]:.2f}, recorded {ratio:.2f}, allowed {ratio * (1 - noise):.2f}"
        for name, ratio in recorded.items()
        if measured[name] < ratio * (1 - noise)
    ]


def main() -> None:
    """Measure, and compare with the recorded ratios or replace them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "passive"  # otherwise waiting threads use processor time
    measured = measured_ratios(options.rounds)
    for name, ratio in measured.items():
        print(f"{ratio:.2f} times as fast as {name}, by processor time; load average {os.getloadavg()[0]:.1f}")
    if options.record:
        RECORDED.write_text(json.dumps({"noise": NOISE, "ratios": measured}, indent=2) + "\n", encoding="utf-8")
        return
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    slower = regressions(recorded["ratios"], measured, recorded["noise"])
    if slower:
        sys.exit("slower than recorded: " + "; ".join(slower))


if __name__ == "__main__":
    main()
