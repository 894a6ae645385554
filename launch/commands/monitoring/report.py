"""`keepstep report`: one HTML file with the figures of one or several runs, or the account of time as text."""

import argparse
import re
from pathlib import Path
from typing import Any

from launch.inspect.sampled_events import EventDigest, digest_events
from launch.output import output_to
from launch.terminal import add_json_option, duration, print_json, print_table, size, visible
from train.errors import ConfigError
from train.run_folder import RunFolder

EXAMPLES = """\
examples:
  keepstep report runs/laptop                      # writes report-laptop.html, which needs no network
  keepstep report runs/a runs/b --out compared.html
  keepstep report runs/laptop --text
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep report`."""
    parser.epilog = EXAMPLES
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, such as runs/laptop")
    parser.add_argument("-o", "--out", type=Path, help="HTML file (default: report-NAME.html in this folder)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="print where the time went; write no file")
    add_json_option(form)


def run(options: argparse.Namespace) -> int:
    """Write the report, or print the account of time."""
    if options.text or options.json:
        if options.out:
            raise ConfigError(f"--out ({options.out}) is for the HTML report; leave out --text and --json")
        return _print(options.runs, as_json_object=options.json)
    from launch.report.page import page
    from launch.report.run_data import read_run

    out: Path = options.out or Path(default_name(options.runs))
    _check_outside(out, options.runs)
    names = _names(options.runs)
    text = page([read_run(path, name) for path, name in zip(options.runs, names, strict=True)])
    with output_to(out, after="nothing was written"):
        from data_pipeline.atomic_file import write_atomic

        write_atomic(out, text.encode(errors="replace"))  # a recipe may have half a surrogate pair
    print(f"{out}: {size(len(text))}; open it in a browser")
    return 0


def default_name(runs: list[Path]) -> str:
    """Return the name of the file, made of the first run's name and the number of the others."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", runs[0].resolve().name)[:100]
    return f"report-{name}{f'-and-{len(runs) - 1}' if len(runs) > 1 else ''}.html"


def _check_outside(out: Path, runs: list[Path]) -> None:
    for path in runs:
        if out.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"--out ({out}) is in the run folder {path}, which a report never changes; name another")


def _names(runs: list[Path]) -> list[str]:
    """Return the names of the folders, with as much of their paths as makes them different."""
    paths = [path.resolve().parts for path in runs]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"{', '.join(map(str, runs))}: a run is named twice; name each run once")


def _print(runs: list[Path], as_json_object: bool) -> int:
    digests: list[EventDigest] = []
    for path in runs:
        folder = RunFolder(path)
        if not folder.events.exists():
            raise ConfigError(f"{folder.events} does not exist; give the folder of a run, such as runs/laptop")
        digests.append(digest_events(folder))
    if as_json_object:
        objects = [as_json(digest) for digest in digests]
        print_json(objects[0] if len(objects) == 1 else dict(zip(map(str, runs), objects, strict=True)))
        return 0
    for number, (path, digest) in enumerate(zip(runs, digests, strict=True)):
        print("" if number == 0 else "\n", end="")
        print_account(path, digest)
    return 0


def print_account(path: Path, digest: EventDigest) -> None:
    """Print what the time of a run was spent on, over all its attempts, and how often each event happened."""
    from launch.report.tables import KINDS

    spent = digest.spent
    attempts = "1 attempt" if spent.attempts == 1 else f"{spent.attempts} attempts"
    print(
        f"{path}: goodput {spent.goodput:.1%} of {duration(spent.total)} in {attempts}; "
        f"{spent.kept_steps:,} steps kept, {spent.lost_steps:,} lost\n"
    )
    total = spent.total or 1.0
    rows = [[KINDS[kind], duration(seconds), f"{seconds / total:.1%}"] for kind, seconds in spent.seconds.items()]
    print_table(["spent on", ">time", ">share"], rows)
    print("\nevents: " + ", ".join(f"{count} {visible(kind)}" for kind, count in sorted(digest.counts.items())))


def as_json(digest: EventDigest) -> dict[str, Any]:
    """Return the account and the number of events of each kind as plain values."""
    spent = digest.spent
    return {
        "goodput": spent.goodput,
        "total_seconds": spent.total,
        "seconds": spent.seconds,
        "attempts": spent.attempts,
        "kept_steps": spent.kept_steps,
        "lost_steps": spent.lost_steps,
        "events": dict(digest.counts),
    }
