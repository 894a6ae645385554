"""Each promise in docs/security.md names a test that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?P<input>[^|]+) \| [^|]+ \| (?P<test>[^|]+) \|$", re.MULTILINE)


def promises() -> list[tuple[str, str]]:
    """The input and the test of each row of the tables of promises."""
    _, _, text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8").partition("## Promises")
    rows = [(row["input"], row["test"].strip("`")) for row in ROW.finditer(text)]
    return [row for row in rows if row[1] not in ("test", "---")]


@pytest.mark.parametrize(("promise", "test"), promises())
def test_a_promise_names_a_test(promise: str, test: str) -> None:
    path, _, name = test.partition("::")
    functions = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in functions, f"{promise}: {path} has no {name}"


def test_every_table_of_the_page_is_read() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8").partition("## Promises")[2]
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| input |", "| ---"))]
    assert len(promises()) == len(rows) >= 40
