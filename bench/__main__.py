"""Every benchmark, one after the other: `make bench` writes docs/benchmarks.md from what they print.

    python -m bench --peers .venv-peers/bin/python --out docs/benchmarks.md [--only step data checkpoint]

The libraries that Keepstep is compared with live in an environment of their own, whose Python is `--peers`.
"""

import argparse
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

from bench.step import machine

INTRODUCTION = """# Benchmarks

Made by `make bench` on {day}: {machine}, Python {python}.
Machines are shared and noisy, so contenders take turns in one run and ratios are what counts; ranges are shown.
How a step's time is spent, and which bars are met, is in [performance.md](performance.md).
"""


def sections(peers: str) -> dict[str, list[tuple[str, list[str]]]]:
    """What to run, by name: titles and commands."""
    ours = sys.executable
    return {
        "step": [
            ("A training step, one process", [ours, "-m", "bench.step", "--peers", peers]),
            ("A training step, two ranks", [ours, "-m", "bench.step", "--peers", peers, "--ranks", "2"]),
            ("A training step, 124M", [ours, "-m", "bench.step", "--peers", peers, "--model", "124M", "--rounds", "3"]),
            ("Holding fewer activations", [ours, "-m", "bench.step", "--recomputation"]),
            ("From the command to the first step", [ours, "-m", "bench.start", "--peers", peers]),
        ],
        "data": [("Reading and preparing data", [peers, "bench/data.py"])],
        "checkpoint": [("Saving and loading checkpoints", [ours, "bench/checkpoint.py"])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=sys.executable, help="the Python of the peers' environment")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks.md"))
    parser.add_argument("--only", nargs="*", help="names of sections: step, data, checkpoint")
    options = parser.parse_args()
    day = date.today().isoformat()
    parts = [INTRODUCTION.format(day=day, machine=machine(), python=platform.python_version())]
    for name, commands in sections(options.peers).items():
        if options.only and name not in options.only:
            continue
        for title, command in commands:
            print(f"{title} ...", file=sys.stderr, flush=True)
            parts.append(f"## {title}\n\n{run(command)}")
    options.out.write_text("\n".join(parts), encoding="utf-8")


def run(command: list[str]) -> str:
    """What it prints. A failure ends everything: half a table is none."""
    environment = os.environ | {"PYTHONPATH": "."}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
