"""`keepstep data trace`: show the documents that a step trained on."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from launch.data.runs import add_run, open_run
from launch.numbers import whole
from launch.terminal import add_json_option, print_json

if TYPE_CHECKING:
    from data_pipeline.stream.trace import TracedSample


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep data trace`."""
    parser.epilog = "example: keepstep data trace runs/laptop --step 1200 --sample 3"
    add_run(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=whole("--step", 1), metavar="N", help="optimizer step, counted from 1")
    which.add_argument(
        "--data-step",
        type=whole("--data-step", 0),
        metavar="N",
        help="global batch, counted from 0, as events.jsonl names skipped batches",
    )
    parser.add_argument(
        "--sample", type=whole("--sample", 0), metavar="K", help="only this position in the global batch, from 0"
    )
    parser.add_argument(
        "--characters",
        type=whole("--characters", 0),
        default=400,
        metavar="N",
        help="characters of each text; 0: all (default: 400)",
    )
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print the rows of the step, and the pieces of documents in them. DataError if there is no such step or sample."""
    from data_pipeline.errors import DataError
    from data_pipeline.stream.trace import trace

    recipe, states = open_run(options.run)
    if options.data_step is None and options.step < 1:
        raise DataError(f"--step ({options.step}) must be at least 1, the first optimizer step")
    if options.data_step is not None and options.data_step < 0:
        raise DataError(f"--data-step ({options.data_step}) must be at least 0, the first global batch")
    samples = trace(
        recipe.data,
        seq_len=recipe.model.seq_len,
        global_batch_size=recipe.train.global_batch_size,
        batch_changes=recipe.batch_changes,
        step=data_step(options.run, options.step) if options.data_step is None else options.data_step,
        positions=None if options.sample is None else [options.sample],
        states=states,
    )
    if options.json:
        print_json({"samples": [asdict(sample) for sample in samples]})
    else:
        for sample in samples:
            print_sample(sample, options.characters)
    return 0


def data_step(folder: Path, step: int) -> int:
    """Return the number of the global batch that an optimizer step used; they differ after a skipped batch."""
    from train.records.curve import clean_curve

    record = clean_curve(folder / "metrics.jsonl").get(step, {})
    return record.get("data_step", step) - 1


def print_sample(sample: "TracedSample", characters: int) -> None:
    """Print one row for people, with the first `characters` of each text; 0: all."""
    print(f"sample {sample.sample}: {sample.source}, epoch {sample.epoch}, row {sample.row}")
    for document in sample.documents:
        text = document.text[:characters] if characters else document.text
        hidden = len(document.text) - len(text)
        more = f" ... {hidden:,} more characters" if hidden else ""
        print(
            f"  {document.file}, document {document.number}, from token {document.first_token}, "
            f"{document.tokens} tokens"
        )
        print("\n".join(f"    | {line}" for line in text.split("\n")) + more)
