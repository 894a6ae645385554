"""Generates the reference pages from the code, so that they always agree with it."""

import ast
import inspect
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import command_page
import recipe_page
from tables import cell, named, table
from train.errors import USER_ERRORS
from train.records.catalogue import EVENTS, METRICS


def pages(root: Path) -> dict[str, str]:
    """Returns the Markdown of every reference page, by page path."""
    return {
        "reference/recipe.md": recipe_page.page(),
        "reference/cli.md": command_page.page(),
        "reference/exit-codes.md": exit_codes(root / "train" / "exit_codes.py"),
        "reference/events.md": names(
            "Events",
            "Each line of `RUN/events.jsonl` is one event. Every event has `time` (wall clock, seconds since 1970), "
            "`uptime` (seconds since the process started) and `kind`.",
            "Kind",
            EVENTS,
        ),
        "reference/metrics.md": names(
            "Metrics",
            "Each line of `RUN/metrics.jsonl` is the record of one step or of one evaluation. Sinks show the "
            "numbers under [tags](../monitoring.md#names).",
            "Name",
            METRICS,
        ),
    }


def names(title: str, introduction: str, column: str, meanings: Mapping[str, str]) -> str:
    """Returns a page with one table of names and their meanings."""
    rows = ((named(name), cell(meaning)) for name, meaning in meanings.items())
    return f"# {title}\n\n{introduction}\n\n" + table((column, "Meaning"), rows)


def exit_codes(file: Path) -> str:
    """Returns the page of exit codes, from the constants of a module and the errors that have codes."""
    codes = table(
        ("Code", "Name", "Meaning"), ((str(code), f"`{name}`", cell(text)) for name, code, text in _constants(file))
    )
    errors = table(
        ("Error", "Code", "Meaning"),
        ((named(error.__name__), str(error.exit_code), cell(inspect.getdoc(error) or "")) for error in USER_ERRORS),
    )
    return (
        "# Exit codes\n\nA training process ends with one of these codes. `keepstep run` and every other `keepstep` "
        f"command use the same codes.\n\n{codes}\n## Errors that a user can fix\n\nThese errors are shown as one "
        "line, without a traceback. Any other error is a bug: its traceback is shown, and the exit code is 1.\n\n"
        f"{errors}"
    )


def _constants(file: Path) -> Iterator[tuple[str, int, str]]:
    """Yields name, value and docstring of each documented constant of a module, ordered by value."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    found: list[tuple[str, int, str]] = []
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case ast.Assign([ast.Name(name)], ast.Constant(int(value))), ast.Expr(ast.Constant(str(text))):
                found.append((name, value, text))
            case _:
                pass
    yield from sorted(found, key=lambda constant: constant[1])
