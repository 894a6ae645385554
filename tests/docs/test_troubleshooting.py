"""docs/troubleshooting.md shows all rules of `keepstep diagnose`, and each message of a rule is one of the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import troubleshooting_page
from launch.diagnose.rules.table import RULES

ROOT = Path(__file__).parents[2]
VALUE = "\0"
"""Stands for an inserted value in a message."""


@cache
def messages() -> set[str]:
    """All texts of the packages, with VALUE in place of inserted values. The rules themselves do not count."""
    files = [
        file
        for package in ("launch", "train", "parallel", "data_pipeline")
        for file in (ROOT / package).rglob("*.py")
        if not file.is_relative_to(ROOT / "launch" / "diagnose")
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


@pytest.mark.parametrize("message", [message for rule in RULES for message in rule.sees])
def test_a_message_of_a_rule_is_in_the_code(message: str) -> None:
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("...")), re.DOTALL)
    assert any(pattern.search(text) for text in messages()), f"no message of the code reads {message!r}"


def test_the_page_is_made_from_the_rules() -> None:
    made = troubleshooting_page.page()
    assert troubleshooting_page.PAGE.read_text() == made, "run `python docs/site/troubleshooting_page.py`"
    assert {rule.section for rule in RULES} <= set(troubleshooting_page.SECTIONS)
