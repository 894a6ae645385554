"""The command line itself: groups, version, mistakes, and what every command offers."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from launch import cli, commands

WITHOUT_FACTS = {"board", "demo", "kubernetes", "schema", "serve", "data", "checkpoint", "watch"}
"""Commands that print no facts, or whose actions have options of their own."""


def test_the_overview_groups_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for title, group in cli.GROUPS.items():
        block = text.split(f"{title}:\n")[1].split("\n\n")[0]
        assert [line.split()[0] for line in block.splitlines()] == list(group)
    assert "example: keepstep run " in text
    assert "documentation: https://" in text


def test_each_command_has_a_file_in_its_folder() -> None:
    root = Path(commands.__path__[0])
    assert {file.stem for file in root.glob("*.py")} - {"__init__"} <= set(cli.COMMANDS)
    missing = [name for name in cli.COMMANDS if not (root / cli.ROOMS.get(name, "") / f"{name}.py").is_file()]
    assert not missing


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"keepstep {version('keepstep')}\n"


def test_an_unknown_command_is_one_line_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stauts"]) == 2
    error = "keepstep: there is no command stauts; did you mean status?; see `keepstep --help`\n"
    assert capsys.readouterr().err == error
    assert cli.main([]) == 2
    assert "usage: keepstep COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_describes_itself(name: str) -> None:
    text = cli.command_parser(name).format_help()
    assert cli.COMMANDS[name].split()[0] in text
    assert name in WITHOUT_FACTS or "--json" in text
    assert name == "data" or re.search(r"examples?: ?\n? +?keepstep ", text)


def test_the_overview_imports_nothing_heavy() -> None:
    code = "import sys; from launch.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "rich", "yaml", "pydantic"} & set(result.stderr.split())
