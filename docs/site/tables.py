"""Writes Markdown tables."""

import re
from collections.abc import Iterable, Sequence

CODE = re.compile(r"(`[^`]*`)")


def cell(text: str) -> str:
    """Returns plain text as the content of a cell. Text in backticks stays code; other Markdown is escaped."""
    parts = CODE.split(" ".join(text.split()).replace("|", "\\|"))
    return "".join(part if CODE.fullmatch(part) else re.sub(r"([\[\]<*_])", r"\\\1", part) for part in parts)


def named(name: str, anchor: str = "") -> str:
    """Returns a name as code that links can point at; the anchor is the name with hyphens, or the one given."""
    return f"`{name}`{{#{anchor or name.replace('.', '-').replace('/', '-')}}}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; cells are Markdown already."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
