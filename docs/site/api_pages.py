"""Generates the API reference: an index, and one page for each package folder, which mkdocstrings fills."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tables import cell, table

PACKAGES = ("train", "parallel", "data_pipeline", "launch")
INDEX = "reference/api/index.md"


def pages(root: Path) -> dict[str, str]:
    """Returns Markdown by page path: the index, and then one page for each folder with modules."""
    rooms = {_room(root, folder): _modules(folder) for folder in _folders(root)}
    return {INDEX: _index(rooms)} | {
        f"reference/api/{room}.md": _page(room, modules) for room, modules in rooms.items()
    }


def _folders(root: Path) -> Iterator[Path]:
    """Yields the folders with modules, each before its sub-folders, packages in reading order."""
    for package in PACKAGES:
        for marker in sorted((root / package).rglob("__init__.py"), key=lambda file: file.parent):
            if _modules(marker.parent):
                yield marker.parent


def _modules(folder: Path) -> list[Path]:
    """Returns the folder's own modules, without `__init__` and `__main__`."""
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("__"))


def _room(root: Path, folder: Path) -> str:
    return ".".join(folder.relative_to(root).parts)


def _index(rooms: dict[str, list[Path]]) -> str:
    """Returns the list of all modules with the first line of each one's docstring."""
    rows = (
        (f"[`{room}.{file.stem}`]({room}.md#{room}.{file.stem})", cell(_first_line(file)))
        for room, files in rooms.items()
        for file in files
    )
    return (
        "# API\n\nKeepstep is a program first: its stable interfaces are the command line, the recipe and the formats "
        "on disk. These pages document the modules for those who read or extend the code.\n\n"
        + table(("Module", "Content"), rows)
    )


def _first_line(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _page(room: str, files: list[Path]) -> str:
    return f"# {room}\n\n" + "\n".join(f"::: {room}.{file.stem}\n" for file in files)
