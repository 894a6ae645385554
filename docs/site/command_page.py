"""Generates the reference of the command line from its argparse parsers."""

# argparse has no public way to list the arguments of a parser.
# pyright: reportPrivateUsage=false

import argparse
from collections.abc import Iterator
from typing import cast

from launch import cli
from tables import cell, table


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yields the parser of every command and of every subcommand, in the order of `keepstep --help`."""
    for name in cli.COMMANDS:
        yield from _with_subcommands(cli.command_parser(name))


def page() -> str:
    """Returns the page: usage and arguments of every command."""
    return "# Command line\n\n" + "\n".join(_section(parser) for parser in parsers())


def _with_subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help for choice in action._choices_actions}
            choices = cast(dict[str, argparse.ArgumentParser], action.choices)  # pyright: ignore
            for name, subcommand in choices.items():
                subcommand.description = subcommand.description or summaries[name]
                yield from _with_subcommands(subcommand)


def _section(parser: argparse.ArgumentParser) -> str:
    level = "##" if parser.prog.count(" ") == 1 else "###"
    rows = [_row(action) for action in parser._actions if action.dest != "help"]
    arguments = table(("Argument", "Default", "Meaning"), rows) if rows else "The command has no arguments.\n"
    return (
        f"{level} {parser.prog} {{#{parser.prog.replace(' ', '-')}}}\n\n{_sentence(parser.description or '')}\n\n"
        f"```text\n{_usage(parser)}\n```\n\n{arguments}"
    )


def _usage(parser: argparse.ArgumentParser) -> str:
    first, *more = parser.format_usage().rstrip().splitlines()
    return "\n".join([first.removeprefix("usage: "), *(line.removeprefix(" " * len("usage: ")) for line in more)])


def _row(action: argparse.Action) -> tuple[str, str, str]:
    names = ", ".join(f"`{_shown(action, option)}`" for option in action.option_strings) or f"`{_value(action)}`"
    default = "" if action.default in (None, False, [], argparse.SUPPRESS) else f"`{action.default}`"
    return names, default, _meaning(action)


def _shown(action: argparse.Action, option: str) -> str:
    return option if action.nargs == 0 else f"{option} {_value(action)}"


def _value(action: argparse.Action) -> str:
    metavar = action.metavar or action.dest.upper()
    return " ".join(metavar) if isinstance(metavar, tuple) else metavar


def _meaning(action: argparse.Action) -> str:
    choices = ", ".join(f"`{choice}`" for choice in action.choices or ())
    text = cell((action.help or "") % vars(action))
    return f"{text}: {choices}" if text and choices else text or choices


def _sentence(text: str) -> str:
    text = cell(text)
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")
