"""`keepstep generate RUN --prompt TEXT`: what a trained model makes of a prompt."""

import argparse
from pathlib import Path

from train.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run folder (its newest checkpoint) or a checkpoint's folder")
    parser.add_argument("--prompt", required=True, help="the beginning of a document")
    parser.add_argument("--tokens", type=int, default=100, help="most tokens to add (default 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest (default 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="sample among the K likeliest (default 50)")
    parser.add_argument("--seed", type=int, default=1, help="of the sampling")


def run(options: argparse.Namespace) -> int:
    if not options.prompt:
        raise ConfigError("--prompt is empty; the model continues the beginning of a document, so give at least a word")
    for name, value, lowest in (("tokens", options.tokens, 1), ("top-k", options.top_k, 1)):
        if value < lowest:
            raise ConfigError(f"--{name} ({value}) must be at least {lowest}")
    if options.temperature < 0:
        raise ConfigError(f"--temperature ({options.temperature}) must be 0 or above")

    from train.export.generate import generate
    from train.export.trained_model import load_trained

    trained = load_trained(options.run)
    prompt = trained.tokenizer.encode(options.prompt)
    new = generate(
        trained.model,
        prompt,
        vocab_size=trained.tokenizer.vocab_size,
        end_of_document=trained.tokenizer.end_of_document,
        max_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    print(trained.tokenizer.decode([*prompt, *new]))
    return 0
