"""`python -m bench.planning`: the error of `keepstep plan` on published runs; with --fit, fit its constants first."""

import argparse
from collections import defaultdict
from pathlib import Path

import yaml

from bench.planning.errors import RowError, order_agreement, row_errors, summary
from bench.planning.fit import fit
from bench.planning.published import read_rows
from launch.plan import constants

BEFORE = "2026-01"
"""Rows dated earlier are fitted; the others only show how well the constants carry over."""
HEADER = """\
# Fitted by `python -m bench.planning --fit` on published runs dated before {before}; constants.py says what each means.
"""


def main() -> None:
    """Fit if asked to; then print the errors."""
    parser = argparse.ArgumentParser(prog="python -m bench.planning", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants and write launch/plan/constants.yaml")
    parser.add_argument("--hops", type=int, default=6, help="descents of each fit (default: 6)")
    parser.add_argument("--rows", action="store_true", help="print the error of every row")
    options = parser.parse_args()
    rows = read_rows()
    found = constants.read_constants()
    if options.fit:
        begin = yaml.safe_load(Path(__file__).with_name("start.yaml").read_text("utf-8"))
        start = constants.Constants.model_validate(begin)
        found = fit([row for row in rows if row.date < BEFORE], start, options.hops, print)
        text = yaml.safe_dump(
            _rounded(found.model_dump(exclude={"measured"})), default_flow_style=None, sort_keys=False
        )
        constants.FILE.write_text(HEADER.format(before=BEFORE) + text, encoding="utf-8")
    errors = row_errors(rows, found, BEFORE)
    print_errors(errors)
    agreement = order_agreement(rows, found)
    pairs = sum(count for _, count, _ in agreement)
    tau = sum(count * value for _, count, value in agreement) / pairs
    print(f"\norder of layouts: Kendall's tau {tau:.2f} over {pairs} pairs in {len(agreement)} groups")
    if options.rows:
        print_rows(errors)


def print_errors(errors: list[RowError]) -> None:
    """Print the errors of dense models and of mixtures of experts, of fitted rows and others, then by release."""
    for is_dense in (True, False):
        for was_fitted in (True, False):
            chosen = [e for e in errors if e.row.is_dense == is_dense and e.was_fitted == was_fitted]
            kind, state = "dense" if is_dense else "mixtures of experts", "fitted" if was_fitted else "not fitted"
            print(f"{kind}, {state}: without a scale: {summary(e.plain for e in chosen)}")
            within = [e.within_release for e in chosen if e.within_release is not None]
            print(f"{kind}, {state}: within a release: {summary(within)}")
    groups: dict[tuple[str, str, str], list[RowError]] = defaultdict(list)
    for error in errors:
        groups[error.row.release].append(error)
    print()
    for (system, date, kind), members in sorted(groups.items(), key=lambda item: item[0][1]):
        within = [e.within_release for e in members if e.within_release is not None]
        print(f"{date} {system}, {kind}: {summary(within)}")


def print_rows(errors: list[RowError]) -> None:
    """Print one line a row."""
    print("\nid, model, gpu, gpus, fitted, published tokens/s per GPU, error, error within the release")
    for e in errors:
        within = "" if e.within_release is None else f"{e.within_release:+.1%}"
        gpus, state = e.row.arrangement.gpus, "yes" if e.was_fitted else "no"
        published = f"{e.row.tokens_per_second:.0f}"
        print(f"{e.row.id}, {e.row.model_name}, {e.row.gpu}, {gpus}, {state}, {published}, {e.plain:+.1%}, {within}")


def _rounded(tree: object) -> object:
    if isinstance(tree, dict):
        return {name: _rounded(value) for name, value in tree.items()}
    return float(f"{tree:.3g}")


if __name__ == "__main__":
    main()
