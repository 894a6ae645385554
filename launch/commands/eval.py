"""`keepstep eval`: the validation loss of a trained model, overall and by data source."""

import argparse
from pathlib import Path

from launch.numbers import whole
from launch.output import output_to
from launch.terminal import add_average_option, add_json_option, print_facts, print_json, print_table, progress
from train.errors import ConfigError
from train.evaluation.losses import Losses, perplexity
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
    parser.add_argument(
        "--tasks",
        metavar="TASK,DIR",
        help="evaluate tasks of lm-evaluation-harness instead of the validation loss: their names, or folders of task "
        "files, with commas between them",
    )
    parser.add_argument("--limit", type=whole("--limit", 1), metavar="N", help="examples of each task (default: all)")
    parser.add_argument(
        "--batch-size", type=whole("--batch-size", 1), metavar="N", help="texts at a time (default: the micro batch)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="new file for the results of --tasks, as JSON")
    add_average_option(parser)
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print the loss in nats per token, the perplexity and the bits per byte; with --tasks, the results of tasks."""
    if options.tasks is not None:
        return _run_tasks(options)
    for name in ("limit", "batch_size", "out"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} belongs to --tasks; leave it out, or name tasks")
    with abort_on_signals("the evaluation"):
        from train.evaluation.checkpoint import evaluate_checkpoint

        with progress(f"evaluating {options.run}", None, "sequences") as advance:
            found = evaluate_checkpoint(options.run, options.data, options.overrides, advance, options.average)
    losses, by_source = found.losses, found.losses.by_source(found.source_names)
    if options.json:
        facts = {"checkpoint": str(found.checkpoint), "step": found.step, "logged_loss": found.logged}
        sources = {name: _values(one) for name, one in by_source.items()}
        print_json({**facts, **_values(losses), "tokens": sum(losses.targets_S), "sources": sources})
        return 0
    print(f"{found.checkpoint}, step {found.step}, on {sum(losses.targets_S):,} tokens")
    logged = [] if found.logged is None else [("logged by the run", f"{found.logged:.4f}")]
    bits = [] if losses.bits_per_byte is None else [("bits per byte", f"{losses.bits_per_byte:.4f}")]
    loss = ("validation loss", f"{losses.mean:.4f} nats per token")
    print_facts([loss, *logged, ("perplexity", f"{perplexity(losses.mean):.5g}"), *bits])
    if len(by_source) > 1:
        rows = [[name, *_shown(one)] for name, one in by_source.items()]
        print_table(["source", ">validation loss", ">perplexity", ">bits per byte"], rows)
    return 0


def _run_tasks(options: argparse.Namespace) -> int:
    tasks = [task.strip() for task in options.tasks.split(",") if task.strip()]
    if not tasks or options.data:
        raise ConfigError("--tasks needs names of tasks or folders, and no --data: tasks have data of their own")
    if options.out is not None and options.out.exists():
        raise ConfigError(f"--out ({options.out}) exists; name a new file")
    with abort_on_signals("the evaluation"):
        from train.evaluation.checkpoint import evaluate_checkpoint_on_tasks

        with progress(f"evaluating {options.run}", None, "texts") as advance:
            checkpoint, step, results = evaluate_checkpoint_on_tasks(
                options.run,
                tasks,
                options.overrides,
                advance,
                limit=options.limit,
                batch_size=options.batch_size,
                average=options.average,
            )
    weights = "average" if options.average else "live"
    facts = {"checkpoint": str(checkpoint), "step": step, "weights": weights, "limit": options.limit}
    if options.out is not None:
        with output_to(options.out, "nothing was left there"):
            results.write(options.out, **facts)
    if options.json:
        print_json({**facts, "results": results.values, "examples": results.examples})
        return 0
    print(f"{checkpoint}, step {step}, by lm-evaluation-harness")
    rows = [
        [task, name, f"{value:.6g}", f"{results.examples[task]:,}" if task in results.examples else ""]
        for task, own in results.values.items()
        for name, value in own.items()
    ]
    print_table(["task", "metric", ">value", ">examples"], rows)
    return 0


def _values(losses: Losses) -> dict[str, float | None]:
    return {
        "loss": losses.mean,
        "perplexity": perplexity(losses.mean),
        "bits_per_byte": losses.bits_per_byte,
    }


def _shown(losses: Losses) -> list[str]:
    bits = "-" if losses.bits_per_byte is None else f"{losses.bits_per_byte:.4f}"
    return [f"{losses.mean:.4f}", f"{perplexity(losses.mean):.5g}", bits]
