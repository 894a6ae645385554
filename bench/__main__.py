"""Every benchmark, one after the other: `make bench` puts what they print into docs/benchmarks.md.

    python -m bench --peers .venv-peers/bin/python [--out docs/benchmarks.md] [--only start step-14M ...]

The page has a place for each, between `<!-- bench NAME -->` and `<!-- end -->`; the words around them stay. Each is
written as soon as it is done. The libraries that Keepstep is compared with live in an environment of their own, whose
Python is `--peers`.
"""

import argparse
import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path


def programs(peers: str) -> dict[str, list[str]]:
    """By name, in the order in which they run."""
    ours = sys.executable
    step, one_thread = [ours, "-m", "bench.step"], ["env", "OMP_NUM_THREADS=1"]
    return {
        "step-14M": [*step, "--peers", peers],
        "step-14M-2-ranks": [*step, "--peers", peers, "--ranks", "2", "--rounds", "4"],
        "step-124M": [*step, "--peers", peers, "--model", "124M", "--rounds", "3", "--steps", "1"],
        "recomputation": [*step, "--recomputation"],
        "start": [ours, "-m", "bench.start", "--peers", peers],
        "checkpoint": [*one_thread, ours, "bench/checkpoint.py"],
        "data": [*one_thread, peers, "bench/data.py"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=sys.executable, help="the Python of the peers' environment")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks.md"))
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=programs(""), help=", ".join(programs("")))
    options = parser.parse_args()
    for name, command in programs(options.peers).items():
        if not options.only or name in options.only:
            print(f"{name}: {' '.join(command)}", file=sys.stderr, flush=True)
            page = put(options.out.read_text(encoding="utf-8"), name, f"Made on {date.today()}.\n\n{run(command)}")
            options.out.write_text(page, encoding="utf-8")


def put(page: str, name: str, text: str) -> str:
    """The page with this text in the place of that name. ValueError if there is no such place."""
    place = re.compile(rf"(<!-- bench {re.escape(name)} -->\n).*?(<!-- end -->\n)", re.DOTALL)
    new, count = place.subn(lambda found: f"{found[1]}{text.rstrip()}\n{found[2]}", page)
    if count != 1:
        raise ValueError(f"{count} places called {name} in the page, where one is needed")
    return new


def run(command: list[str]) -> str:
    """What it prints. A failure ends everything: half a table is none."""
    # Unbuffered, for some programs print by several processes.
    environment = os.environ | {"PYTHONPATH": ".", "PYTHONUNBUFFERED": "1"}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
