"""`make bench` replaces the output of each program on the page, and leaves the text around it unchanged."""

from pathlib import Path

import pytest

from bench.__main__ import programs, put

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def test_the_page_has_one_section_for_each_program() -> None:
    page = PAGE.read_text()
    for name in programs("python"):
        page = put(page, name, "| new |")
    assert page.count("| new |") == len(programs("python"))
    assert "## Against the bars" in page


def test_only_the_text_between_the_marks_changes() -> None:
    page = "words\n<!-- bench a -->\nold\n<!-- end -->\nmore\n<!-- bench b -->\nold\n<!-- end -->\n"
    assert put(page, "a", "new \\1\n") == page.replace("old", "new \\1", 1)
    with pytest.raises(ValueError, match="0 sections called c"):
        put(page, "c", "new")
