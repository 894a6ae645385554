"""The `keepstep` command. Each subcommand is a module of this package, imported only when it is asked for.

A command module has `configure(parser)`, which adds its arguments, and `run(options) -> int`, which returns the exit
code. Errors that the user can mend are shown as one line; a bug shows its traceback.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": ("launch.demo", "the whole system on this machine in minutes: train, kill, resume, compare, export"),
    "run": ("launch.local", "train a recipe on this machine"),
    "schema": ("launch.schema", "print the JSON schema of recipes"),
    "data": ("launch.data", "build, show, audit and trace data sets"),
    "checkpoint": ("launch.checkpoint", "list, verify, compare, copy and import checkpoints"),
    "export": ("launch.export", "write a checkpoint as a Hugging Face folder"),
    "generate": ("launch.generate", "continue a prompt"),
    "submit": ("launch.slurm", "submit a recipe to Slurm"),
    "status": ("launch.status", "show where a run stands"),
    "stop": ("launch.stop", "ask a run to save and end"),
    "doctor": ("launch.doctor", "check this machine or an allocation"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="keepstep", description="Pretrain GPT language models.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = arguments[0] if arguments else None
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == wanted:
            importlib.import_module(module).configure(subparser)
    options = parser.parse_args(arguments)
    command = importlib.import_module(COMMANDS[options.command][0])
    from train.errors import USER_ERRORS

    try:
        return command.run(options)
    except USER_ERRORS as error:
        print(f"keepstep: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
