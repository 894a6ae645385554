"""Every file, folder and setting that README.md, ARCHITECTURE.md and docs/ name in inline code exists."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from train.config import Recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = "launch|train|parallel|data_pipeline|slurm|recipes|tests|bench|docs|\\.ci"
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*\w/?")
MADE_BY_USERS = {"slurm/cluster.env"}


def named_paths(page: str) -> set[str]:
    """Paths in the inline code of a page. Patterns such as `slurm/*.sbatch` are left out."""
    codes = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page)
    return {path for code in codes if "*" not in code for path in PATH.findall(code)} - MADE_BY_USERS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_paths_exist(page: Path) -> None:
    missing = sorted(path for path in named_paths(page.read_text()) if not (ROOT / path).exists())
    assert not missing, f"{page.relative_to(ROOT)} names what does not exist: {', '.join(missing)}"


def test_paths_are_found_in_inline_code_only() -> None:
    page = (
        "`train/loop.py`, `parallel/engines/`, `python bench/data.py --x`, `my/train/x.py`, train/gone.py, `slurm/*.sh`"
    )
    assert named_paths(page) == {"train/loop.py", "parallel/engines/", "bench/data.py"}


SECTIONS = {
    name: set(section.model_fields)
    for name, field in Recipe.model_fields.items()
    if isinstance(section := field.annotation, type) and issubclass(section, BaseModel)
}
"""Settings of each section of a recipe."""
SETTING = re.compile(rf"(?<![\w./-])({'|'.join(SECTIONS)})\.([a-z_]+)\b(?![.(/])")
NO_SETTINGS = {"data.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_settings_exist(page: Path) -> None:
    codes = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text())
    named = {match for code in codes for match in SETTING.findall(code)}
    unknown = {f"{section}.{key}" for section, key in named if key not in SECTIONS[section]} - NO_SETTINGS
    assert not unknown, f"{page.relative_to(ROOT)} names settings that do not exist"
