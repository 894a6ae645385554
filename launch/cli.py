"""The `keepstep` command line.

Each subcommand is a module of `launch.commands`, or of a folder in it (ROOMS), with the command's name. It is imported
only when the command is called. The module has `configure(parser)`, which adds the arguments, and `run(options) ->
int`, which returns the exit code. An error that a user can fix is printed as one line; a bug keeps its traceback.
"""

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from types import ModuleType

GROUPS: dict[str, dict[str, str]] = {
    "train": {
        "demo": "run the whole system on this machine in minutes: train, kill, resume, compare, export",
        "run": "train a recipe on this machine, or as one node of several",
        "sweep": "train a recipe with each combination of some values, and show the best",
        "ladder": "train a ladder of model sizes, and predict the loss of the recipe's own",
        "plan": "compute what a run will take on any number of GPUs: memory, time, failures, cost",
        "submit": "submit a recipe to Slurm",
        "kubernetes": "print the manifest that trains a recipe on Kubernetes",
        "stop": "ask a run to save and stop",
        "profile": "ask a run to profile its next steps: what they spend time on",
        "prove": "train, kill, resume and compare: report whether every bit is equal",
    },
    "data": {
        "data": "build, show, repack, audit and trace data sets",
    },
    "checkpoints and models": {
        "checkpoint": "list, show, verify, compare, copy, average, import and convert checkpoints",
        "eval": "compute the validation loss and perplexity of a checkpoint",
        "export": "write a checkpoint as a Hugging Face folder",
        "generate": "continue prompts with a trained model",
        "serve": "serve a trained model to clients of OpenAI's completions, on this machine",
    },
    "machines": {
        "doctor": "check this machine, or every node of a Slurm allocation, for what breaks runs",
    },
    "inspect": {
        "status": "show the state of runs: step, speed, goodput, checkpoint, failure, slow ranks",
        "diagnose": "say why a run failed, which rank is faulty, and what to do",
        "watch": "show a run, or several, in the terminal while it runs",
        "report": "write the figures of runs as one HTML file, or show where the time went",
        "board": "show the curves of runs in TensorBoard",
        "schema": "print the JSON schema of recipes",
    },
}
"""Names and summaries of the subcommands, in the groups and the order of `keepstep --help`."""

COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}

ROOMS = {
    "sweep": "sweeps",
    "ladder": "sweeps",
    "profile": "monitoring",
    "board": "monitoring",
    "report": "monitoring",
    "watch": "monitoring",
    "generate": "models",
    "serve": "models",
}
"""Folder below `launch/commands` of the commands that are not in it directly."""

OVERVIEW = """\
usage: keepstep COMMAND ...

Pretrain GPT language models on one machine or many, and resume after any failure.

{groups}

options:
  -h, --help    print this overview; `keepstep COMMAND --help` describes a command
  --version     print the version

example: keepstep run recipes/laptop.yaml --ranks 2 train.steps=50
documentation: https://github.com/keepstep/keepstep#readme"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(overview(), file=sys.stderr)
        return 2
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name == "--version":
        from importlib.metadata import version

        print(f"keepstep {version('keepstep')}")
        return 0
    if name not in COMMANDS:
        print(f"keepstep: there is no command {name}{_suggestion(name)}; see `keepstep --help`", file=sys.stderr)
        return 2
    return _call(name, rest)


def overview() -> str:
    """Return the text of `keepstep --help`: all commands by group."""
    groups = (
        "\n".join([f"{title}:", *(f"  {name:<12}  {summary}" for name, summary in commands.items())])
        for title, commands in GROUPS.items()
    )
    return OVERVIEW.format(groups="\n\n".join(groups))


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command, with all of its arguments."""
    return _parser(name, _module(name))


def _call(name: str, arguments: list[str]) -> int:
    command = _module(name)
    from data_pipeline.credentials import RedactingFormatter, print_exception, redact
    from launch.terminal import visible
    from train.errors import USER_ERRORS

    assert logging.lastResort is not None
    logging.lastResort.setFormatter(RedactingFormatter())  # commands set up no other handler
    sys.excepthook = print_exception
    try:
        return command.run(_parse(_parser(name, command), arguments))
    except USER_ERRORS as error:
        print(visible(redact(f"keepstep: {error}")), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 0


def _module(name: str) -> ModuleType:
    room = f"{ROOMS[name]}." if name in ROOMS else ""
    return importlib.import_module(f"launch.commands.{room}{name}")


def _parser(name: str, command: ModuleType) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter  # keeps the lines of examples
    parser = argparse.ArgumentParser(prog=f"keepstep {name}", description=COMMANDS[name], formatter_class=formatter)
    command.configure(parser)
    return parser


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Accept overrides before, between and after options."""
    try:
        return parser.parse_intermixed_args(arguments)
    except TypeError:  # argparse cannot do so for a command with subcommands of its own
        return parser.parse_args(arguments)


def _suggestion(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, COMMANDS, n=1)
    return f"; did you mean {close[0]}?" if close else ""


if __name__ == "__main__":
    sys.exit(main())
