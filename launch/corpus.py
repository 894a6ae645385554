"""A small corpus that every machine has: the sources and docstrings of Python's standard library."""

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {"site-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "encodings"}
"""Folders of the standard library that are left out."""


def gather(out: Path, limit_bytes: int) -> tuple[int, int]:
    """Write the corpus to `out` as jsonl, completely or not at all; return the documents and bytes of text."""
    documents = size = 0
    partial = out.with_name(out.name + ".partial")
    with partial.open("w", encoding="utf-8") as lines:
        for name, text in _documents():
            if size + len(text) > limit_bytes:
                continue
            lines.write(json.dumps({"text": text, "name": name}) + "\n")
            documents += 1
            size += len(text.encode())
    partial.rename(out)
    return documents, size


def _documents() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED & set(name.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        yield str(name), source
        yield from _docstrings(str(name), source)


def _docstrings(name: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield each docstring of more than 200 characters as a document of its own."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > 200:
                yield f"{name}:{getattr(node, 'name', 'module')}", text
