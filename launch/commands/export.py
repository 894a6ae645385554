"""`keepstep export`: write a checkpoint as a folder that Hugging Face libraries read."""

import argparse
from dataclasses import asdict
from pathlib import Path

from launch.output import output_to
from launch.terminal import add_average_option, add_json_option, print_json, progress
from train.exit_codes import FAILED, FINISHED
from train.health.stop import abort_on_signals


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep export`."""
    parser.epilog = "example: keepstep export runs/laptop --out exported --check"
    parser.add_argument("run", type=Path, help="run folder, whose newest checkpoint is taken, or a checkpoint's folder")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the exported model")
    parser.add_argument(
        "--check", action="store_true", help="reload the model and compare logits; token ids are always compared"
    )
    add_average_option(parser)
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Export the model; with --check, return exit code 1 if the reloaded model differs."""
    with abort_on_signals("the export"):
        return _export(options)


def _export(options: argparse.Namespace) -> int:
    from parallel.engines.fp8 import silence_torchao

    silence_torchao()  # transformers imports torchao where it is installed
    from train.export.folder import check, export
    from train.export.trained_model import open_trained

    stages = progress(f"exporting {options.run}", 2 + options.check, "stages")  # load, write, check
    writing = output_to(options.out, "nothing was left there")
    with writing, stages as advance, open_trained(options.run, options.average) as trained:
        advance(1)
        texts = export(trained, options.out)
        advance(1)
        found = check(trained, options.out) if options.check else None
    passed = found is None or found.largest_difference <= 1e-3 * max(1.0, found.largest_logit)
    if options.json:
        exported = {"run": str(options.run), "step": trained.step, "out": str(options.out), "equal_texts": texts}
        print_json(exported | {"check": None if found is None else asdict(found) | {"passed": passed}})
        return FINISHED if passed else FAILED
    print(f"exported step {trained.step} of {options.run} to {options.out}")
    print(f"reloaded with AutoTokenizer: the ids of training on {texts} of {texts} texts")
    if found is not None:
        print(
            f"reloaded with AutoModelForCausalLM: logits differ by at most {found.largest_difference:.1e} "
            f"(the largest is {found.largest_logit:.1f})"
        )
    return FINISHED if passed else FAILED
