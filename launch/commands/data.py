"""`keepstep data`: tokenizer, build, show, repack, audit and trace. Each action is a module of `launch.data`."""

import argparse

from launch.data import audit, build, repack, show, tokenizer, trace

ACTIONS = {
    "tokenizer": (tokenizer, "train a tokenizer"),
    "build": (build, "build a data set from text"),
    "show": (show, "show the contents of a data set"),
    "repack": (repack, "build a data set again with another row length, without tokenizing"),
    "audit": (audit, "check that every row is read as often as planned"),
    "trace": (trace, "show the documents that a step trained on"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand for each action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (module, summary) in ACTIONS.items():
        formatter = argparse.RawDescriptionHelpFormatter  # keeps the lines of examples
        module.configure(actions.add_parser(name, help=summary, description=summary, formatter_class=formatter))


def run(options: argparse.Namespace) -> int:
    """Run the chosen action and return its exit code."""
    return ACTIONS[options.action][0].run(options)
