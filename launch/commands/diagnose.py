"""`keepstep diagnose`: say why a run failed, which rank and node is faulty, and what to do (`launch/diagnose`)."""

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from launch.diagnose.reading import read_evidence
from launch.diagnose.verdict import diagnose
from launch.diagnose.words import cause_lines, facts
from launch.inspect.run_status import require_run
from launch.terminal import add_json_option, print_facts, print_json, visible

EXAMPLES = """\
examples:
  keepstep diagnose runs/laptop
  keepstep diagnose runs/laptop --json

The command reads the run folder alone: events, metrics, heartbeats, and the logs of all ranks and of the Slurm job. It
judges the newest start. The verdict is restart, stop or continue; Slurm jobs are requeued by the same rules.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep diagnose`."""
    parser.epilog = EXAMPLES
    parser.add_argument("run", type=Path, help="run folder, such as runs/laptop")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print the verdict."""
    require_run(options.run)
    found = diagnose(read_evidence(options.run, time.time()))
    if options.json:
        print_json(asdict(found))
        return 0
    print(f"{visible(str(options.run))}: {found.state}")
    for line in cause_lines(found):
        print(f"  {visible(line)}")
    print_facts(facts(found))
    return 0
