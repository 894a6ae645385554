"""Runs all benchmarks in turn. `make bench` puts their output into docs/benchmarks.md.

    python -m bench --peers .venv-peers/bin/python [--out docs/benchmarks.md] [--only start step-14M ...]

The page has a section for each, between `<!-- bench NAME -->` and `<!-- end -->`. The text around these sections is
kept. Each section is written as soon as its benchmark is done. The libraries that Keepstep is compared with need a
separate environment; `--peers` is its Python.
"""

import argparse
import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path


def programs(peers: str) -> dict[str, list[str]]:
    """Command line of each benchmark by name, in the order in which they run. `peers`: the Python of the peers."""
    ours = sys.executable
    step, one_thread = [ours, "-m", "bench.step"], ["env", "OMP_NUM_THREADS=1"]
    return {
        "step-14M": [*step, "--peers", peers],
        "step-14M-2-ranks": [*step, "--peers", peers, "--ranks", "2", "--rounds", "4"],
        "step-124M": [*step, "--peers", peers, "--model", "124M", "--rounds", "3", "--steps", "1"],
        "recomputation": [*step, "--recomputation"],
        "start": [ours, "-m", "bench.start", "--peers", peers],
        "scale": [*one_thread, ours, "-m", "bench.scale"],
        "checkpoint": [*one_thread, ours, "bench/checkpoint.py"],
        "data": [*one_thread, peers, "bench/data.py"],
    }


def main() -> None:
    """Run the benchmarks that the command line names and update the page."""
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
    """The page with the section `name` replaced by `text`. ValueError unless the page has exactly one such section."""
    section = re.compile(rf"(<!-- bench {re.escape(name)} -->\n).*?(<!-- end -->\n)", re.DOTALL)
    new, count = section.subn(lambda found: f"{found[1]}{text.rstrip()}\n{found[2]}", page)
    if count != 1:
        raise ValueError(f"the page has {count} sections called {name}; it needs exactly one")
    return new


def run(command: list[str]) -> str:
    """The output of a command. CalledProcessError if it fails, so that no incomplete table is written."""
    # Unbuffered, because several processes of some programs print.
    environment = os.environ | {"PYTHONPATH": ".", "PYTHONUNBUFFERED": "1"}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
