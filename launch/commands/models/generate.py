"""`keepstep generate`: continue prompts with a trained model."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launch.numbers import number, whole
from launch.output import output_to
from launch.terminal import add_average_option, add_json_option, print_json, progress, visible
from train.errors import ConfigError
from train.health.stop import abort_on_signals

if TYPE_CHECKING:
    from train.generation.complete import Request
    from train.generation.open_model import Opened
    from train.generation.prompt_file import Prompt

RUN_HELP = "run folder, whose newest checkpoint is taken; a checkpoint's folder; or a folder of Hugging Face"
EXAMPLES = """\
examples:
  keepstep generate runs/laptop --prompt "def " --stop "return"
  keepstep generate runs/laptop --prompts prompts.jsonl --out texts.jsonl   # lines such as {"prompt": "def "}
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep generate`."""
    parser.epilog = EXAMPLES
    parser.add_argument("run", type=Path, help=RUN_HELP)
    parser.add_argument("--prompt", help="beginning of a document")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='file with {"prompt": TEXT} on each line')
    parser.add_argument("--out", type=Path, metavar="FILE", help="new file for the texts of --prompts (default: print)")
    parser.add_argument(
        "--batch-size", type=whole("--batch-size", 1), default=8, help="prompts of a file at a time (default: 8)"
    )
    parser.add_argument("--tokens", type=whole("--tokens", 1), default=100, help="most tokens to add (default: 100)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text before which to stop; repeat it for several"
    )
    _add_sampling(parser)
    add_average_option(parser)
    add_json_option(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    def add(name: str, least: float, most: float, default: float, meaning: str) -> None:
        kind = number(name, least, most)
        parser.add_argument(name, type=kind, default=default, help=f"{meaning} (default: {default:g})")

    add("--temperature", 0, 1000, 0.8, "0 always takes the most likely token")
    parser.add_argument(
        "--top-k",
        type=whole("--top-k", 0),
        default=50,
        help="sample among the K most likely tokens; 0: all (default: 50)",
    )
    add("--top-p", 0, 1, 1.0, "sample among the most likely tokens that have this probability together")
    add("--min-p", 0, 1, 0.0, "leave out tokens with less than this share of the highest probability")
    add("--repetition-penalty", 0.01, 100, 1.0, "above 1: make tokens less likely that the text has already")
    parser.add_argument("--seed", type=whole("--seed", 0), default=1, help="seed of the sampling (default: 1)")


def run(options: argparse.Namespace) -> int:
    """Print the prompt and its continuation, or continue the prompts of a file."""
    _check(options)
    with abort_on_signals("the generation"):
        from train.generation.open_model import open_model
        from train.generation.prompt_file import read_prompts

        prompts = None if options.prompts is None else read_prompts(options.prompts)
        opened = open_model(options.run, options.average)
        if prompts is not None:
            _continue_file(options, opened, prompts)
        elif options.json:
            _print_document(options, opened)
        else:
            _print_text(options, opened)
    return 0


def _check(options: argparse.Namespace) -> None:
    if (options.prompt is None) == (options.prompts is None):
        raise ConfigError("give one of --prompt TEXT and --prompts FILE")
    if options.prompt == "":
        raise ConfigError("--prompt is empty; the model continues the beginning of a document, so give at least a word")
    if "" in options.stop:
        raise ConfigError("--stop is empty; give the text before which to stop")
    if options.prompts is None and options.out is not None:
        raise ConfigError(f"--out ({options.out}) is for --prompts; redirect the output of --prompt: > FILE")
    if options.out is not None and options.out.exists():
        raise ConfigError(f"--out ({options.out}) exists; name a new file")


def _request(options: argparse.Namespace) -> "Request":
    from train.generation.complete import Request
    from train.generation.sampling import Sampling

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k or None,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )
    prompts = [] if options.prompt is None else [options.prompt]
    return Request(prompts, options.tokens, sampling, [options.seed], options.stop)


def _print_text(options: argparse.Namespace, opened: "Opened") -> None:
    """Print the text as it grows. A terminal gets no control characters."""
    from train.generation.complete import complete

    shown = visible if sys.stdout.isatty() else str
    completion = complete(opened, _request(options))
    print(shown(completion.prompts[0]), end="", flush=True)
    for new in completion.steps:
        print(shown(new.get(0, "")), end="", flush=True)
    print()


def _print_document(options: argparse.Namespace, opened: "Opened") -> None:
    from train.generation.complete import complete

    completion = complete(opened, _request(options))
    with progress("generating", options.tokens, "tokens") as advance:
        for _ in completion.steps:
            advance(1)
    row = completion.rows[0]
    facts = {"run": str(options.run), "step": opened.step, "text": completion.prompts[0] + row.text}
    print_json({**facts, "tokens": row.tokens, "finish": row.finish, "cache_bytes": completion.cache_bytes})


def _continue_file(options: argparse.Namespace, opened: "Opened", prompts: "list[Prompt]") -> None:
    from train.generation.prompt_file import continue_prompts, write_results

    with progress("generating", len(prompts), "texts") as advance:
        lines = continue_prompts(opened, prompts, _request(options), options.batch_size, advance)
        if options.out is None:
            for line in lines:
                print(line, end="", flush=True)
        else:
            with output_to(options.out, "nothing was left there"):
                write_results(lines, options.out)
