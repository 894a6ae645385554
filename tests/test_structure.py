"""The structure of the repository: imports go one way, folders stay small, the command line stays light."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "parallel": {"data_pipeline", "train", "launch"},
    "data_pipeline": {"parallel", "train", "launch", "torch"},
    "train": {"launch"},
    "launch": set[str](),
}


def imported_packages(file: Path) -> set[str]:
    """Returns the top-level packages that a file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_only_packages_below_it(package: str) -> None:
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
    """Returns the modules of this repository that each module imports, in functions too, but not for types alone."""
    files = {module_name(file): file for package in FORBIDDEN for file in (ROOT / package).rglob("*.py")}
    return {name: {found for found in imported_names(file) if found in files} for name, file in files.items()}


def module_name(file: Path) -> str:
    """Returns the dotted name of a module's file."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_names(file: Path) -> set[str]:
    """Returns each import as written and with each imported name: `from a import b` gives `a` and `a.b`."""
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
    remaining = imports_by_module()
    while outside := [
        name for name in remaining if imports_none_of(remaining, name) or imported_by_none(remaining, name)
    ]:
        for name in outside:
            del remaining[name]
    assert not remaining, f"these files import each other in a circle: {sorted(remaining)}"


def imports_none_of(modules: dict[str, set[str]], name: str) -> bool:
    return not modules[name] & modules.keys()


def imported_by_none(modules: dict[str, set[str]], name: str) -> bool:
    return not any(name in imported for imported in modules.values())


def test_a_folder_has_few_files_on_one_level() -> None:
    for package in FORBIDDEN:
        for folder in (ROOT / package, *(path for path in (ROOT / package).rglob("*") if path.is_dir())):
            files = [file.name for file in folder.glob("*.py") if file.name != "__init__.py"]
            assert len(files) <= 16, f"{folder} has {len(files)} files; give it rooms with names"


def test_every_package_ships_its_types() -> None:
    """PEP 561: without py.typed, type checkers ignore the annotations of an installed package."""
    assert all((ROOT / package / "py.typed").is_file() for package in FORBIDDEN)


def test_every_package_is_listed_for_the_install() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {module_name(file) for package in FORBIDDEN for file in (ROOT / package).rglob("__init__.py")}
    assert listed == present | {"slurm", "recipes"}


def test_tests_mirror_the_packages() -> None:
    for package in FORBIDDEN:
        for test in (ROOT / "tests" / package).rglob("test_*.py"):
            folder = ROOT / test.parent.relative_to(ROOT / "tests")
            assert folder.is_dir(), f"{test} has no folder {folder} to test"


def test_no_file_has_a_name_that_says_nothing() -> None:
    names = {file.name for package in FORBIDDEN for file in (ROOT / package).rglob("*.py")}
    assert not names & {"utils.py", "helpers.py", "common.py"}
    for package in FORBIDDEN:
        for file in (ROOT / package).rglob("__init__.py"):
            assert not file.read_text(), file


def test_no_test_has_a_limit_that_a_busy_machine_reaches() -> None:
    limit = re.compile(r"\btimeout=(\d+)|monotonic\(\) \+ (\d+)")
    for file in (ROOT / "tests").rglob("*.py"):
        short = [found[0] for found in limit.finditer(file.read_text()) if int(found[1] or found[2]) < 600]
        assert not short or "slurm" in file.parts, f"{file}: {short[0]} must be at least 600 s; it only ends a hang"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this copy of the repository has no history")
def test_the_top_level_has_only_the_agreed_entries() -> None:
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files"]  # whoever owns the files
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    agreed = (
        "pyproject.toml launch train parallel data_pipeline slurm tests README.md recipes bench docs Makefile "
        "ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md LICENSE .ci .github .gitignore .pre-commit-config.yaml"
    )
    assert {line.partition("/")[0] for line in tracked.splitlines()} <= set(agreed.split())


def test_the_commit_hook_refuses_subjects_of_72_characters() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (refused,) = [re.compile(hook["entry"]) for hook in hooks if hook["id"] == "subject-length"]
    assert refused.search("x" * 72 + "\n\nbody\n")
    assert not refused.search("x" * 71 + "\n\n" + "y" * 100 + "\n")


def test_hosted_ci_runs_the_same_check_as_every_machine() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["check"]["steps"][-1]["run"] == ".ci/run"
    for template in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(template.read_text()), template
