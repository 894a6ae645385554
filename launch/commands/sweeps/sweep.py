"""`keepstep sweep`: train a recipe with each combination of some values, and show the best (`launch/sweeps/`)."""

import argparse
from collections.abc import Sequence

from launch.commands import submit
from launch.numbers import whole
from launch.sweeps.grid import combinations, read_settings
from launch.sweeps.runs import outcome_of, plan_run, train_in_turn
from launch.sweeps.sweep_report import print_sweep, report_of
from launch.terminal import add_json_option, print_json
from parallel.errors import LaunchError
from train.config_file import load_recipe
from train.exit_codes import FAILED, FINISHED

EXAMPLES = """\
examples:
  keepstep sweep recipes/laptop.yaml optim.lr=1e-3,2e-3,4e-3 model.n_layers=2,4 train.steps=50
  keepstep sweep recipes/laptop.yaml 'optim.betas=[0.9,0.95],[0.9,0.99]'      # commas in brackets belong to the value
  keepstep sweep recipes/laptop.yaml optim.lr=1e-3,2e-3 --show                # what has finished; trains nothing
  keepstep sweep recipes/llama-1b.yaml optim.lr=1e-4,3e-4 --slurm -- --nodes 4     # options of keepstep submit

Each run has its own folder, named by what differs. The same command continues: it trains what has not finished.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep sweep`."""
    parser.epilog = EXAMPLES
    parser.add_argument("recipe", help="YAML file of the recipe")
    parser.add_argument(
        "overrides",
        nargs="*",
        help="settings; those with several values, such as optim.lr=1e-3,2e-3, are swept; after --, options of "
        "`keepstep submit`",
    )
    parser.add_argument("--ranks", type=whole("--ranks", 1, 4096), help="processes of each run, as for `keepstep run`")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="train nothing; show the runs as they are")
    what.add_argument("--slurm", action="store_true", help="submit the runs as a Slurm array job")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Train the runs in turn and print the table. Exit code 1 if a run did not finish, unless with --show."""
    overrides, further = submit.split_words(options.overrides)
    if further and not options.slurm:
        raise LaunchError(f"{further[0]} and what follows is for `keepstep submit`; add --slurm, or leave it out")
    settings = read_settings(overrides)
    fixed = [f"{key}={values[0]}" for key, values in settings.items() if len(values) == 1]
    swept = {key: values for key, values in settings.items() if len(values) > 1}
    if not swept:
        raise LaunchError("no setting has several values; write them with commas, such as optim.lr=1e-3,2e-3")
    if options.slurm:
        return _submit(options, fixed, swept, further)
    base, chosen = load_recipe(options.recipe, fixed), combinations(swept)
    runs = [plan_run(options.recipe, [*fixed, *one.overrides], f"{base.name}-{one.suffix}") for one in chosen]
    outcomes = [outcome_of(each) for each in runs] if options.show else list(train_in_turn(runs, options.ranks))
    report = report_of(chosen, outcomes)
    if options.json:
        print_json(report.as_json())
    else:
        print_sweep(report)
    is_complete = all(outcome.ending.state == "finished" for outcome in outcomes)
    return FINISHED if options.show or is_complete else FAILED


def _submit(options: argparse.Namespace, fixed: Sequence[str], swept: dict[str, list[str]], further: list[str]) -> int:
    """Submit the same runs with `keepstep submit --sweep`."""
    words = [options.recipe, *fixed]
    for key, values in swept.items():
        words += ["--sweep", f"{key}={','.join(values)}"]
    words += ["--ranks", str(options.ranks)] if options.ranks else []
    words += ["--json"] if options.json else []
    parser = argparse.ArgumentParser(prog="keepstep submit")
    submit.configure(parser)
    return submit.run(parser.parse_intermixed_args([*words, *further]))
