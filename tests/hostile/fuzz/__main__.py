"""`make fuzz`: fuzz every format, print a table, and end with exit code 1 if there is a finding."""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.hostile.fuzz.formats.all import FORMATS
from tests.hostile.fuzz.session import session

CPU_SECONDS = 5


def main() -> int:
    """Run the inputs; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.fuzz")
    parser.add_argument("--inputs", type=int, default=20_000, help="inputs over all formats (default: 20000)")
    parser.add_argument("--seed", type=int, help="seed of the inputs (default: a new one, which is printed)")
    parser.add_argument("--wall-seconds", type=float, default=120.0, help="limit of an input (default: 120)")
    parser.add_argument("formats", nargs="*", help=f"some of {', '.join(FORMATS)} (default: all)")
    options = parser.parse_args()
    chosen = [FORMATS[name] for name in options.formats or FORMATS]
    seed = random.randrange(2**32) if options.seed is None else options.seed
    each = -(-options.inputs // len(chosen))
    print(f"{each} inputs of each of {len(chosen)} formats, seed {seed}", flush=True)
    print(f"{'format':<24}{'inputs':>8}{'refused':>9}{'CPU s':>8}{'MB':>6}{'findings':>10}", flush=True)
    total = findings = 0
    with (
        tempfile.TemporaryDirectory(prefix="keepstep-fuzz-") as folder,
        session(Path(folder), CPU_SECONDS, options.wall_seconds) as opened,
    ):
        for format in chosen:
            report = opened.fuzz(format, each, seed)
            total, findings = total + report.inputs, findings + len(report.findings)
            print(
                f"{report.format:<24}{report.inputs:>8}{report.refused:>9}{report.slowest_seconds:>8.2f}"
                f"{report.grown_bytes >> 20:>6}{len(report.findings):>10}",
                flush=True,
            )
            for kind, shortest in report.findings.items():
                print(f"    {report.counts[kind]} x {kind}\n        {shortest}", flush=True)
    print(f"{total} inputs, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
