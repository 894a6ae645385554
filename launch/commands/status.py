"""`keepstep status`: show the state of a run, or of several, read from their folders alone (`launch/inspect`)."""

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.inspect.events import describe
from launch.inspect.overview import Overview, overview_of, runs_at
from launch.inspect.run_status import RunStatus, is_run, read_status
from launch.numbers import whole
from launch.terminal import add_json_option, duration, local_time, print_facts, print_json, print_table, visible
from train.errors import ConfigError

EXAMPLES = """\
examples:
  keepstep status                            # all runs in runs/
  keepstep status runs/laptop --events 20    # one run in full
  keepstep status runs/a runs/b /scratch/me/runs --json
"""
COLUMNS = (
    "run",
    "state",
    ">step",
    ">loss",
    ">tokens/s",
    ">goodput",
    ">checkpoint",
    ">restarts",
    "job",
    "held by",
    "why it failed first",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep status`."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="run folders, or folders that have some (default: runs)"
    )
    parser.add_argument("--events", type=whole("--events", 0), metavar="N", help="last events of one run (default: 5)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print the state of one run in full, or one line for each of several."""
    paths: list[Path] = options.runs
    if len(paths) == 1 and is_run(paths[0]):
        return _show_one(paths[0], 5 if options.events is None else options.events, options.json)
    runs = runs_at(paths)
    if options.events is not None:
        raise ConfigError(f"--events ({options.events}) is for one run, and there are {len(runs)}; name one run folder")
    lines = [overview_of(path) for path in runs]
    if options.json:
        print_json({"runs": [asdict(line) for line in lines]})
    elif lines:
        print_table(COLUMNS, [cells(line) for line in lines])
    else:
        print("there are no runs here; `keepstep run RECIPE` starts one")
    return 0


def cells(line: Overview) -> list[str]:
    """Return the cells of a run in the table, in the order of COLUMNS."""
    of_all = f" of {line.steps:,}" if line.steps else ""
    speed = "" if line.tokens_per_second is None else f"{line.tokens_per_second:,.0f}"
    return [
        line.run,
        line.state,
        "" if line.step is None else f"{line.step:,}{of_all}",
        "" if line.loss is None else f"{line.loss:.4f}",
        speed if line.mfu is None else f"{speed} (MFU {line.mfu:.0%})",
        "" if line.goodput is None else f"{line.goodput:.0%}",
        "" if line.saved_step is None else f"{line.saved_step:,}",
        str(line.restarts),
        line.job,
        line.holder,
        line.cause,
    ]


def _show_one(path: Path, events: int, as_json: bool) -> int:
    status = read_status(path, time.time(), events)
    if as_json:
        print_json(asdict(status))
        return 0
    print(f"{path}: {status.state}")
    for line in cause_lines(status.root_cause):
        print(f"  {visible(line)}")
    print_facts(facts(status))
    if status.events:
        print()
        rows = [[local_time(event["time"]), event["kind"], describe(event)] for event in status.events]
        print_table(["time", "event", "details"], rows)
    return 0


def facts(status: RunStatus) -> list[tuple[str, str]]:
    """Return names and values for people."""
    shown: list[tuple[str, str]] = []
    if status.state == "pending":
        shown.append(("Slurm jobs", f"{', '.join(status.jobs)}; `squeue --job {','.join(status.jobs)}` shows them"))
    if status.state == "interrupted":
        shown.append(("interrupted", "the run was killed or its node is lost; the same command resumes it"))
    if status.step is not None:
        of_all = f" of {status.steps:,}" if status.steps else ""
        if status.steps and status.step > status.steps:
            of_all = f" (beyond the recipe's last, {status.steps:,})"
        ago = "" if status.silent_seconds is None else f", {duration(round(status.silent_seconds))} ago"
        shown.append(("step", f"{status.step:,}{of_all}{ago}"))
    if status.loss is not None:
        shown.append(("loss", f"{status.loss:.4f}"))
    if status.validation_loss is not None:
        shown.append(("validation loss", f"{status.validation_loss:.4f} at step {status.validation_step:,}"))
    if status.tokens_per_second:
        shown.append(("speed", f"{status.tokens_per_second:,.0f} tokens/s{_efficiency(status)}"))
    shown.append(("newest checkpoint", "none" if status.saved_step is None else f"step {status.saved_step:,}"))
    if status.stop_requested:
        shown.append(("stop", "requested; the run saves and stops after its current step"))
    return shown + rank_facts(status.ranks)


def _efficiency(status: RunStatus) -> str:
    if status.mfu is not None:
        return f", MFU {status.mfu:.1%}"
    return "" if status.share_of_measured_peak is None else f", {status.share_of_measured_peak:.0%} of measured peak"


def rank_facts(ranks: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the phases of the ranks, and the stragglers, from the watchdog's status.json."""
    if not ranks:
        return []
    phases: dict[str, int] = {}
    for rank in ranks["ranks"]:
        phases[rank["phase"]] = phases.get(rank["phase"], 0) + 1
    counts = ", ".join(f"{count} in {phase}" for phase, count in sorted(phases.items()))
    shown = [("ranks", f"{len(ranks['ranks'])}: {counts}; last progress {duration(ranks['idle_seconds'])} before")]
    by_number = {rank["rank"]: rank for rank in ranks["ranks"]}
    for number in ranks["slow"]:
        rank = by_number[number]
        probe = f"its probe took {1e3 * rank['probe_seconds']:.2f} ms"
        shown.append(("straggler", f"rank {number} on {rank['host']}: {probe}"))
    return shown


def cause_lines(failure: dict[str, Any] | None) -> list[str]:
    """Return why the newest attempt failed: the rank that failed first and the end of its log."""
    if failure is None:
        return []
    when = local_time(failure["time"])
    lines = [f"root cause: rank {failure['rank']} on {failure['host']} failed first ({failure['ending']}) at {when}"]
    lines += [f"  | {line}" for line in failure["lines"]]
    return lines + ([f"  full log: {failure['log']}"] if failure["log"] else [])
