"""`keepstep doctor`: check this machine, or every node of an allocation, for what breaks runs (`launch/doctor/`).

Each finding states what was found, why it matters, and the remedy. `srun keepstep doctor --cluster` checks every node
and Slurm's settings, and the nodes connect to each other. `--measure` adds speeds.
"""

import argparse
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from launch.doctor.cards import fastest_port
from launch.doctor.finding import Finding
from launch.doctor.machine import examine
from launch.doctor.measure import as_machine, judge, measure, readable
from launch.doctor.network import check_connections
from launch.doctor.slurm import slurm_findings
from launch.terminal import print_table
from parallel.environ import read_world
from train.exit_codes import FAILED, FINISHED

EXAMPLES = """\
examples:
  keepstep doctor --dir runs
  keepstep doctor --measure > my.yaml; keepstep plan RECIPE --gpus 8 --gpu HOST --machines my.yaml
  srun --ntasks-per-node=1 keepstep doctor --cluster --measure      # every node of a Slurm allocation
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep doctor`."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="folder for runs, whose file system is checked (default: this one)"
    )
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="also check Slurm's settings and, under srun, connections between the nodes",
    )
    parser.add_argument(
        "--measure", action="store_true", help="also measure matrix products, memory, disk and, under srun, the network"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line: the findings, then the figures")


def run(options: argparse.Namespace) -> int:
    """Print findings and figures; return exit code 1 if there is a problem. Collective under a launcher."""
    findings = list(examine(options.dir))
    world = read_world(os.environ)
    if options.cluster and world.rank == 0:
        findings += slurm_findings()
    if options.cluster and world.world_size > 1:
        findings += check_connections(world)
    figures = measure(options.dir, world) if options.measure else {}
    findings += judge(figures, fastest_port())
    host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    if options.json:  # short lines: srun may break long ones, and mix those of several nodes
        for finding in findings:
            print(json.dumps({"host": host, **asdict(finding)}))
        print(json.dumps({"host": host, "figures": figures}), flush=True)
    else:
        show(f"# {host}" if figures else host, findings, figures)
        if figures:
            print_machine(host, figures)
    code = FAILED if any(finding.level == "problem" for finding in findings) else FINISHED
    if options.measure and world.world_size > 1:
        from parallel.bootstrap import leave_at_once

        leave_at_once(code)  # gloo's threads may abort an ordinary exit
    return code


def print_machine(host: str, figures: Mapping[str, float]) -> None:
    """Print the figures as a line of a file that `keepstep plan --machines` reads. JSON is YAML too."""
    from train.model.kernels.linear import SLOW

    machine = as_machine(figures, has_16_bits=bool(figures["devices"]) or not SLOW)
    print(json.dumps({host: machine})[1:-1], flush=True)


def show(host: str, findings: Sequence[Finding], figures: Mapping[str, float]) -> None:
    """Print a table whose every line begins with the host, so that the lines of several nodes can be told apart."""
    rows: list[list[str]] = []
    for finding in findings:
        rows.append([host, finding.level, finding.what])
        rows += [[host, "", f"why: {finding.why}"]] if finding.why else []
        rows += [[host, "", f"do:  {finding.do}"]] if finding.do else []
    rows += [[host, "measured", f"{name}: {value}"] for name, value in readable(figures)]
    print_table(["# host" if host.startswith("#") else "host", "level", "finding"], rows)
