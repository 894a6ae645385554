"""The `keepstep` command. Each subcommand is a module of this package, imported only when it is asked for.

A command module has `configure(parser)`, which adds its arguments, and `run(options) -> int`, which returns the exit
code. Errors that the user can mend are shown as one line; a bug shows its traceback.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": (
        "launch.commands.demo",
        "the whole system on this machine in minutes: train, kill, resume, compare, export",
    ),
    "run": ("launch.supervise.local", "train a recipe on this machine"),
    "schema": ("launch.commands.schema", "print the JSON schema of recipes"),
    "data": ("launch.commands.data", "build, show, audit and trace data sets"),
    "checkpoint": ("launch.commands.checkpoint", "list, verify, compare, copy and import checkpoints"),
    "export": ("launch.commands.export", "write a checkpoint as a Hugging Face folder"),
    "generate": ("launch.commands.generate", "continue a prompt"),
    "submit": ("launch.clusters.slurm", "submit a recipe to Slurm"),
    "status": ("launch.commands.status", "show where a run stands"),
    "stop": ("launch.commands.stop", "ask a run to save and end"),
    "prove": ("launch.commands.prove", "train, kill, resume and compare; a report of what held"),
    "report": ("launch.commands.report", "show what every second of a run was spent on"),
    "kubernetes": ("launch.clusters.kubernetes", "print the manifest that trains a recipe on Kubernetes"),
    "doctor": ("launch.commands.doctor", "check this machine or an allocation"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        _overview().parse_args(arguments)
        return 0
    name, *rest = arguments
    module, summary = COMMANDS[name]
    command = importlib.import_module(module)
    parser = argparse.ArgumentParser(prog=f"keepstep {name}", description=summary)
    command.configure(parser)
    options = _parse(parser, rest)
    from train.errors import USER_ERRORS

    try:
        return command.run(options)
    except USER_ERRORS as error:
        print(f"keepstep: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 0


def _overview() -> argparse.ArgumentParser:
    """Knows the commands' names and what each is for."""
    parser = argparse.ArgumentParser(prog="keepstep", description="Pretrain GPT language models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Overrides may stand before, between and after options."""
    try:
        return parser.parse_intermixed_args(arguments)
    except TypeError:  # a command with commands of its own
        return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
