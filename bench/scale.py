"""Measures what rank 0, or each rank, does once for all ranks: the control plane, with 64 to 4,096 simulated ranks.

`python -m bench.scale [--ranks 64 256 1024 4096] [--only NAME ...]`. Each figure is the CPU time and the growth of
memory of a process of its own, so that a busy machine changes it little. No rank trains. Ranks are simulated by what
they would send or write: heartbeats come over real connections to a real store, files lie in a real folder.
"""

import argparse
import math
import multiprocessing
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch  # imported here, so that each measured process finds it in memory

from bench import scale_parts
from bench.scale_heartbeats import STATUS, heartbeats
from bench.scale_parts import PARTS, Part
from train.health import garbage

REPETITIONS = 3
LONG_SECONDS = 5.0
"""CPU seconds of a part after which it is not repeated."""
CPU_SHARE = 0.05
"""Largest share of a core that rank 0 may use for the heartbeats of 4,096 ranks."""
Figures = dict[str, float]
"""Seconds of CPU time (`seconds`), growth of memory (`mib`), and more by name."""


def main() -> None:
    """Measure the parts that the command line names and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024, 4096])
    parser.add_argument("--only", nargs="*", choices=PARTS, metavar="NAME", help=", ".join(PARTS))
    options = parser.parse_args()
    parts = {name: part for name, part in PARTS.items() if not options.only or name in options.only}
    found = {name: [apart(measure, part, ranks) for ranks in options.ranks] for name, part in parts.items()}
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}\n")
    print_table(
        "CPU time in ms", options.ranks, {name: [1e3 * f["seconds"] for f in row] for name, row in found.items()}
    )
    print_table("memory in MiB", options.ranks, {name: [f["mib"] for f in row] for name, row in found.items()})
    if not options.only:
        print_heartbeats(options.ranks, [apart(heartbeats, ranks) for ranks in options.ranks])


def measure(part: Part, ranks: int) -> Figures:
    """The CPU seconds of a part and the memory that it adds, in this process."""
    folder = Path(tempfile.mkdtemp(prefix="keepstep-scale-"))
    try:
        times: list[float] = []
        mib = 0.0
        garbage.pause()  # as ranks do
        while len(times) < REPETITIONS and sum(times) < LONG_SECONDS:
            action = part(ranks, folder)
            before = scale_parts.memory_mib()
            started = time.process_time()
            result = action()
            times.append(time.process_time() - started)
            mib = max(mib, scale_parts.memory_mib() - before)
            del result
        return {"seconds": statistics.median(times), "mib": mib}
    finally:
        shutil.rmtree(folder)


def apart(function: Callable[..., Figures], *arguments: object) -> Figures:
    """What a function returns in a process of its own. RuntimeError if it fails."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__}{arguments} failed; see its traceback") from None
    finally:
        process.join()


def _send(sender: Connection, function: Callable[..., Figures], arguments: Sequence[object]) -> None:
    sender.send(function(*arguments))


def print_table(title: str, ranks: Sequence[int], rows: dict[str, list[float]]) -> None:
    """Print values by part and number of ranks, and how they grow from the last number but one to the last."""
    print(f"| {title} | {' | '.join(f'{n:,} ranks' for n in ranks)} | growth |")
    print(f"| --- |{' --- |' * (len(ranks) + 1)}")
    for name, values in rows.items():
        print(f"| {name} | {' | '.join(f'{value:.1f}' for value in values)} | {growth(ranks, values)} |")
    print()


def growth(ranks: Sequence[int], values: Sequence[float]) -> str:
    """The exponent of the growth between the last two numbers of ranks, as `n^0.98`; 1 is linear. "" if unknown.

    Below a millisecond or a mebibyte, the figure would be noise."""
    if len(ranks) < 2 or min(values[-2:]) < 1:
        return ""
    return f"n^{math.log(values[-1] / values[-2]) / math.log(ranks[-1] / ranks[-2]):.2f}"


def print_heartbeats(ranks: Sequence[int], found: Sequence[Figures]) -> None:
    """Print what heartbeats cost rank 0."""
    print("| heartbeats at rank 0 | every, s | ms of CPU a round | ms of CPU a status.json | share of a core |")
    print("| --- | --- | --- | --- | --- |")
    for number, one in zip(ranks, found, strict=True):
        round_ms, status_ms = 1e3 * one["seconds"], 1e3 * one[STATUS]
        print(f"| {number:,} ranks | {one['interval']:.1f} | {round_ms:.0f} | {status_ms:.0f} | {one['share']:.2%} |")
    worst = found[-1]["share"]
    print(
        f"\nBar: at most {CPU_SHARE:.0%} of a core at {ranks[-1]:,} ranks: {'met' if worst <= CPU_SHARE else 'missed'}."
    )


if __name__ == "__main__":
    main()
