import subprocess
import sys

import pytest

from launch.cli import command_parser, main
from launch.commands.data import ACTIONS


def test_the_help_lists_every_action(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "--help"])
    text = capsys.readouterr().out
    assert [
        line.split()[0] for line in text.splitlines() if line.startswith("    ") and line.split()[0] in ACTIONS
    ] == [
        "tokenizer",
        "build",
        "show",
        "repack",
        "audit",
        "trace",
    ]


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_can_print_json_and_shows_an_example(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_parser("data").parse_args([action, "--help"])
    text = capsys.readouterr().out
    assert "--json" in text
    assert f"example: keepstep data {action} " in text


@pytest.mark.parametrize("arguments", [["data", "--help"], ["data", "build", "--help"]])
def test_the_help_imports_no_large_library(arguments: list[str]) -> None:
    program = (
        "import sys; from launch.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        "large = {'torch', 'numpy', 'pyarrow', 'pydantic', 'rich', 'fsspec'} & set(sys.modules)\n"
        "sys.exit(f'imported {large}' if large else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
