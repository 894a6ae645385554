"""Each message in the first column of docs/troubleshooting.md is a message of the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "\0"
"""Stands for an inserted value in a message."""


@cache
def messages() -> set[str]:
    """All texts of the packages, with VALUE in place of inserted values."""
    files = [
        file for package in ("launch", "train", "parallel", "data_pipeline") for file in (ROOT / package).rglob("*.py")
    ]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {re.sub(r"%[\d.]*[a-z]", VALUE, text) for node in nodes if len(text := text_of(node)) > 8}


def text_of(node: ast.AST) -> str:
    """The text of a string expression; VALUE for what is not text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(VALUE if isinstance(value, ast.FormattedValue) else text_of(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case _:
            return VALUE


def shown() -> list[str]:
    """The messages that the page shows."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", shown())
def test_a_message_on_the_page_is_in_the_code(message: str) -> None:
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("...")), re.DOTALL)
    assert any(pattern.search(text) for text in messages()), f"no message of the code reads {message!r}"
