"""Imports go one way, and the command line stays light: launch -> train -> {parallel, data_pipeline}."""

import ast
import subprocess
import sys
import tomllib
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


def imports_by_module() -> dict[str, set[str]]:
    """Modules of this repository that each module imports, in functions too, but not for types alone."""
    files = {module_name(file): file for package in FORBIDDEN for file in (ROOT / package).rglob("*.py")}
    return {name: {found for found in imported_names(file) if found in files} for name, file in files.items()}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_names(file: Path) -> set[str]:
    """Each import as written, and with each name that it takes: `from a import b` gives `a` and `a.b`."""
    names: set[str] = set()
    nodes = [ast.parse(file.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        nodes += list(ast.iter_child_nodes(node))  # pyright: ignore[reportArgumentType]
    return names


def test_no_files_import_each_other_in_a_circle() -> None:
    left = imports_by_module()
    while outside := [name for name, needed in left.items() if not needed & left.keys() or not imported_in(left, name)]:
        for name in outside:
            del left[name]
    assert not left, f"these files import each other in a circle: {sorted(left)}"


def imported_in(modules: dict[str, set[str]], name: str) -> bool:
    return any(name in needed for needed in modules.values())


def test_a_folder_has_few_files_on_one_level() -> None:
    for package in FORBIDDEN:
        for folder in (ROOT / package, *(path for path in (ROOT / package).rglob("*") if path.is_dir())):
            files = [file.name for file in folder.glob("*.py") if file.name != "__init__.py"]
            assert len(files) <= 16, f"{folder} has {len(files)} files; give it rooms with names"


def test_every_package_is_listed_for_the_install() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {module_name(file) for package in FORBIDDEN for file in (ROOT / package).rglob("__init__.py")}
    assert listed == present | {"slurm", "recipes"}


def test_tests_mirror_the_packages() -> None:
    for package in FORBIDDEN:
        for test in (ROOT / "tests" / package).rglob("test_*.py"):
            folder = ROOT / test.parent.relative_to(ROOT / "tests")
            assert folder.is_dir(), f"{test} tests nothing in {folder}"


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
