"""`keepstep eval`: the validation loss of a trained model, overall and by data source."""

import argparse
import math
from pathlib import Path

from launch.terminal import add_json_option, print_facts, print_json, print_table, progress
from train.health.stop import abort_on_signals


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep eval`."""
    parser.epilog = "example: keepstep eval runs/laptop --data moved/laptop train.eval_sequences=1000"
    parser.add_argument("run", type=Path, help="run folder, whose newest checkpoint is taken, or a checkpoint's folder")
    parser.add_argument(
        "overrides",
        nargs="*",
        help="settings that replace those of the checkpoint's recipe: data, train.eval_sequences (0: all), "
        "train.micro_batch_size, parallel.device, parallel.precision",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FOLDER",
        help="data set to evaluate on, in place of the recipe's; repeat it for several",
    )
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print the loss in nats per token and the perplexity."""
    with abort_on_signals("the evaluation"):
        from train.export.evaluation import evaluate_checkpoint

        with progress(f"evaluating {options.run}", None, "sequences") as advance:
            found = evaluate_checkpoint(options.run, options.data, options.overrides, advance)
    losses, targets = found.losses, sum(found.losses.targets_S)
    perplexity = _perplexity(losses.mean)
    by_source = losses.by_source(found.source_names)
    if options.json:
        facts = {"checkpoint": str(found.checkpoint), "step": found.step, "logged_loss": found.logged}
        sources = {name: {"loss": loss, "perplexity": _perplexity(loss)} for name, loss in by_source.items()}
        print_json({**facts, "loss": losses.mean, "perplexity": perplexity, "tokens": targets, "sources": sources})
        return 0
    print(f"{found.checkpoint}, step {found.step}, on {targets:,} tokens")
    logged = [] if found.logged is None else [("logged by the run", f"{found.logged:.4f}")]
    print_facts(
        [("validation loss", f"{losses.mean:.4f} nats per token"), *logged, ("perplexity", f"{perplexity:.5g}")]
    )
    if len(by_source) > 1:
        rows = [[name, f"{loss:.4f}", f"{_perplexity(loss):.5g}"] for name, loss in by_source.items()]
        print_table(["source", ">validation loss", ">perplexity"], rows)
    return 0


def _perplexity(loss: float) -> float:
    """e to the loss, as far as a float can hold it."""
    return math.exp(min(loss, 700.0))
