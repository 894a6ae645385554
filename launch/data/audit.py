"""`keepstep data audit`: check that every row is read as often as planned, and that a run used what was planned."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from launch.data.runs import add_run, open_run
from launch.numbers import whole
from launch.terminal import add_json_option, print_json, print_table, progress

if TYPE_CHECKING:
    from data_pipeline.stream.audit import Audit
    from train.config import Recipe


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep data audit`."""
    parser.epilog = "example: keepstep data audit runs/laptop"
    add_run(parser)
    parser.add_argument(
        "--ranks",
        type=_numbers,
        default=(1, 2, 3, 4, 8),
        metavar="N,N",
        help="numbers of ranks to check (default: 1,2,3,4,8)",
    )
    parser.add_argument(
        "--steps", type=whole("--steps", 1), metavar="N", help="steps to walk (default: up to the newest checkpoint)"
    )
    add_json_option(parser)


def _numbers(text: str) -> tuple[int, ...]:
    parse = whole("--ranks", 1, 4096)
    return tuple(parse(number) for number in text.split(","))


def run(options: argparse.Namespace) -> int:
    """Walk the plan and print the rows of each epoch. DataError names the first violation."""
    from data_pipeline.stream.audit import audit, plan_of

    recipe, states = open_run(options.run)
    batch_size = recipe.train.global_batch_size
    steps = options.steps or (states[0]["step"] if states else recipe.train.steps)
    plan = plan_of(recipe.data, recipe.model.seq_len, batch_size, states, recipe.batch_changes)
    result = audit(plan, plan.batch_sizes.first_sample(steps), options.ranks, states, progress)
    if options.json:
        print_json(as_json(result, recipe))
    else:
        print_audit(result, recipe)
    return 0


def as_json(result: "Audit", recipe: "Recipe") -> dict[str, Any]:
    """Return the result as JSON values."""
    epochs = [
        {**asdict(epoch), "source": recipe.data.sources[epoch.source].path, "complete": epoch.complete}
        for epoch in result.epochs
    ]
    return {**asdict(result), "epochs": epochs}


def print_audit(result: "Audit", recipe: "Recipe") -> None:
    """Print the result for people."""
    ranks = ", ".join(str(size) for size in result.world_sizes)
    print(f"{result.samples:,} samples are the same on {ranks} ranks; no row comes twice in an epoch")
    rows = [
        [
            recipe.data.sources[epoch.source].path,
            str(epoch.epoch),
            f"{epoch.seen:,}",
            f"{epoch.rows:,}",
            "complete, every row once" if epoch.complete else f"{epoch.rows - epoch.seen:,} rows not yet used",
        ]
        for epoch in result.epochs
    ]
    print_table(["source", ">epoch", ">rows used", ">of", "state"], rows)
    print(
        "the counters of the newest checkpoint agree with the plan"
        if result.counters_compared
        else "no counters were compared: there is no checkpoint at this step"
    )
