"""`keepstep generate`: continue a prompt with a trained model."""

import argparse
from pathlib import Path

from launch.numbers import number, whole
from launch.terminal import add_json_option, print_json, progress
from train.errors import ConfigError

MIN_TEMPERATURE = 1e-4
"""Below this the most likely token is taken: quotients of logits would overflow."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep generate`."""
    parser.epilog = 'example: keepstep generate runs/laptop --prompt "def "'
    parser.add_argument("run", type=Path, help="run folder, whose newest checkpoint is taken, or a checkpoint's folder")
    parser.add_argument("--prompt", required=True, help="beginning of a document")
    parser.add_argument("--tokens", type=whole("--tokens", 1), default=100, help="most tokens to add (default: 100)")
    parser.add_argument(
        "--temperature",
        type=number("--temperature", 0, 1000),
        default=0.8,
        help="0 always takes the most likely token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=whole("--top-k", 1), default=50, help="sample among the K most likely tokens (default: 50)"
    )
    parser.add_argument("--seed", type=whole("--seed", 0), default=1, help="seed of the sampling (default: 1)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print the prompt and its continuation."""
    if not options.prompt:
        raise ConfigError("--prompt is empty; the model continues the beginning of a document, so give at least a word")

    from train.export.generate import generate
    from train.export.trained_model import open_trained

    with open_trained(options.run) as trained:
        pass  # the tokenizer is in memory, so its files are not needed any more
    tokenizer = trained.tokenizer
    begin = [] if tokenizer.beginning_of_document is None else [tokenizer.beginning_of_document]
    prompt = tokenizer.encode(options.prompt)
    new: list[int] = []
    with progress("generating", options.tokens, "tokens") as advance:
        for token in generate(
            trained.model,
            [*begin, *prompt],
            vocab_size=tokenizer.vocab_size,
            end_of_document=tokenizer.end_of_document,
            max_tokens=options.tokens,
            temperature=options.temperature if options.temperature >= MIN_TEMPERATURE else 0.0,
            top_k=options.top_k,
            seed=options.seed,
        ):
            new.append(token)
            advance(1)
    text = tokenizer.decode([*prompt, *new])
    if options.json:
        print_json({"run": str(options.run), "step": trained.step, "text": text, "tokens": new})
    else:
        print(text)
    return 0
