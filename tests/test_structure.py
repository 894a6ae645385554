"""Imports go one way, and the command line stays light: launch -> train -> {parallel, data_pipeline}."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "parallel": {"data_pipeline", "train", "launch"},
    "data_pipeline": {"parallel", "train", "launch", "torch"},
    "train": {"launch"},
    "launch": set[str](),
}


def imported_packages(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    for file in (ROOT / package).rglob("*.py"):
        assert not imported_packages(file) & FORBIDDEN[package], file


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["submit", "--help"], ["schema"]])
def test_the_command_line_answers_without_torch(arguments: list[str]) -> None:
    program = (
        "import sys; from launch.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules or 'pyarrow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout


def test_no_file_has_a_name_that_says_nothing() -> None:
    names = {file.name for package in FORBIDDEN for file in (ROOT / package).rglob("*.py")}
    assert not names & {"utils.py", "helpers.py", "common.py"}
    for package in FORBIDDEN:
        for file in (ROOT / package).rglob("__init__.py"):
            assert not file.read_text(), file


def test_the_top_level_holds_what_was_agreed() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    agreed = (
        "pyproject.toml launch train parallel data_pipeline slurm tests README.md recipes bench docs Makefile "
        "ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md LICENSE .ci .gitignore .pre-commit-config.yaml"
    )
    assert {line.partition("/")[0] for line in tracked.splitlines()} <= set(agreed.split())
