"""`keepstep export RUN --out DIR`: a trained model for everything that reads Hugging Face folders."""

import argparse
from pathlib import Path

from train.health.stop import abort_on_signals


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run folder (its newest checkpoint) or a checkpoint's folder")
    parser.add_argument("--out", type=Path, required=True, help="the new folder")
    parser.add_argument("--check", action="store_true", help="reload it and compare logits and token ids")


def run(options: argparse.Namespace) -> int:
    with abort_on_signals("the export"):
        return _export(options)


def _export(options: argparse.Namespace) -> int:
    from parallel.engines.fp8 import silence_torchao

    silence_torchao()  # transformers imports it where it is installed
    from train.export.folder import check, export
    from train.export.trained_model import load_trained

    trained = load_trained(options.run)
    export(trained, options.out)
    print(f"exported step {trained.step} of {options.run} to {options.out}")
    if not options.check:
        return 0
    found = check(trained, options.out)
    print(
        f"reloaded with AutoModelForCausalLM: logits differ by at most {found.largest_difference:.1e} "
        f"(the largest is {found.largest_logit:.1f})\n"
        f"reloaded with AutoTokenizer: the same ids on {found.equal_texts} of {found.texts} validation texts"
    )
    return 0 if found.largest_difference <= 1e-3 * max(1.0, found.largest_logit) else 1
