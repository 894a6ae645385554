"""`keepstep ladder`: train small models of the recipe's kind, and predict the loss of its own (`launch/sweeps/`)."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from launch.numbers import short_count, whole
from launch.sweeps import ladder_plot
from launch.sweeps.ladder import (
    FILE,
    Ladder,
    Prediction,
    check,
    document,
    ladder_folder,
    ladder_of,
    predict,
    read,
    write,
)
from launch.sweeps.rungs import parameters_of, read_ratios, read_sizes, rungs, tokens_of
from launch.sweeps.runs import Outcome, outcome_of, train_in_turn
from launch.sweeps.scaling_law import ScalingLaw
from launch.sweeps.sweep_report import loss_of, print_failures
from launch.terminal import add_json_option, print_facts, print_json, print_table
from train.config import Recipe
from train.config_file import load_recipe
from train.exit_codes import FAILED, FINISHED

EXAMPLES = """\
examples:
  keepstep ladder recipes/llama-1b.yaml --sizes 100M,150M,250M,400M
  keepstep ladder recipes/llama-1b.yaml --sizes 100M,150M,250M --tokens-per-parameter 5,20,40   # also fits B / D^b
  keepstep ladder recipes/llama-1b.yaml --sizes 100M,150M,250M,400M --show      # what has finished; trains nothing
  keepstep ladder recipes/llama-1b.yaml --check runs/llama-1b                   # exit code 1 if it left the band

Runs are in RUNS_DIR/NAME-ladder-SIZE; the law and its plot are in RUNS_DIR/NAME-ladder. The same command continues.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep ladder`."""
    parser.epilog = EXAMPLES
    parser.add_argument("recipe", help="YAML file of the recipe")
    parser.add_argument("overrides", nargs="*", help="settings that replace the recipe's, such as train.seed=2")
    parser.add_argument("--sizes", default="1M,3M,10M,30M", help="numbers of parameters (default: %(default)s)")
    parser.add_argument(
        "--tokens-per-parameter",
        default="20",
        metavar="D/N",
        help="training tokens for each parameter, one number or several (default: %(default)s)",
    )
    parser.add_argument("--ranks", type=whole("--ranks", 1, 4096), help="processes of each run, as for `keepstep run`")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="train nothing; fit the runs that have finished")
    what.add_argument("--check", type=Path, metavar="RUN", help="compare a finished run with the ladder's band")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Train, fit, predict and plot; or check a run. Exit code 1 if a run failed, or if the checked one is outside."""
    recipe = load_recipe(options.recipe, options.overrides)
    if options.check is not None:
        return _check(recipe, options.check, as_json=options.json)
    sizes, ratios = read_sizes(options.sizes), read_ratios(options.tokens_per_parameter)
    planned = rungs(options.recipe, options.overrides, sizes, ratios)
    outcomes = [outcome_of(each) for each in planned] if options.show else list(train_in_turn(planned, options.ranks))
    ladder = ladder_of(recipe, outcomes)
    if not options.json:
        _print_runs(outcomes, ladder)
    law = ladder.law()
    prediction = predict(ladder, law, recipe)
    found = document(ladder, law, prediction)
    files = {FILE: json.dumps(found, indent=2).encode(), "ladder.html": ladder_plot.page(ladder, law, prediction)}
    if (picture := ladder_plot.picture(ladder, law, prediction)) is not None:
        files["ladder.png"] = picture
    write(ladder_folder(recipe), files)
    if options.json:
        print_json(found)
    else:
        _print_law(ladder, law)
        _print_prediction(recipe, prediction, ladder.level)
        print(f"plot: {ladder_folder(recipe) / 'ladder.html'}")
    return FINISHED if len(ladder.rungs) == len(outcomes) else FAILED


def _print_runs(outcomes: Sequence[Outcome], ladder: Ladder) -> None:
    rows: list[list[str]] = []
    for outcome in outcomes:
        recipe, loss = outcome.run.recipe, loss_of(outcome.ending, ladder.metric)
        model = recipe.model
        shape = f"{model.n_layers} x {model.d_model}"
        sizes = [f"{parameters_of(model):,}", shape, short_count(tokens_of(recipe)), str(recipe.train.steps)]
        rows.append([recipe.name, *sizes, outcome.ending.state, "" if loss is None else f"{loss:.4f}"])
    metric = ladder.metric.replace("_", " ")
    print_table(["run", ">parameters", ">layers x width", ">tokens", ">steps", "state", f">{metric}"], rows)
    print_failures(outcomes)


def _print_law(ladder: Ladder, law: ScalingLaw) -> None:
    if law.with_tokens:
        print("\nL(N, D) = E + A / N^a + B / D^b, for N parameters and D tokens")
    else:
        print(
            f"\nL(N) = E + A / N^a at {ladder.ratios[0]:.3g} tokens per parameter, where B / D^b cannot be told apart"
        )
    print_facts(
        [(name, f"{found.value:.4g}  ({found.low:.4g} to {found.high:.4g})") for name, found in law.constants().items()]
    )
    print(f"  runs lie {law.sigma:.2g} nats beside the law; all ranges hold with {ladder.level:.0%} confidence")


def _print_prediction(recipe: Recipe, prediction: Prediction, level: float) -> None:
    what = f"{recipe.name}: {prediction.parameters:,} parameters on {short_count(prediction.tokens)} tokens"
    band = f"{prediction.low:.4f} to {prediction.high:.4f} in {level:.0%} of runs"
    print(f"\n{what}: loss {prediction.loss:.4f} nats per token, {band}")
    if not prediction.is_own_length:
        own = tokens_of(recipe)
        print(
            f"  the recipe itself trains on {short_count(own)} tokens, and this law says nothing of that; give "
            f"--tokens-per-parameter {own / prediction.parameters:.3g}, or two numbers"
        )


def _check(recipe: Recipe, path: Path, *, as_json: bool) -> int:
    verdict = check(read(recipe), path)
    band = verdict.band
    if as_json:
        print_json({"run": verdict.run, "loss": verdict.loss, "predicted": vars(band), "inside": verdict.inside})
    else:
        where = "inside" if verdict.inside else "above" if verdict.loss > band.high else "below"
        print(f"{verdict.run}: loss {verdict.loss:.4f}, {where} the band {band.low:.4f} to {band.high:.4f}")
    return FINISHED if verdict.inside else FAILED
