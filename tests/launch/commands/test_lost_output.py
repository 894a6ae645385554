"""`keepstep prove` and `keepstep demo` go on when nobody can read their output any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from pathlib import Path
from types import SimpleNamespace
from launch.cli import main
from launch.commands import {module} as command

def work(*_):
    for _ in range(3):
        print("progress", flush=True)
        print("progress", file=sys.stderr, flush=True)
    Path(sys.argv[1]).touch()
    return {result}

command.{work} = work
sys.exit(main({arguments} + [sys.argv[2]]))
"""
PROVE = {
    "module": "prove",
    "work": "prove",
    "result": "SimpleNamespace(passed=False, as_text=lambda: 'text')",
    "arguments": ["prove", "recipe.yaml", "--out"],
}
DEMO = {"module": "demo", "work": "run_demo", "result": "False", "arguments": ["demo", "--dir"]}


@pytest.mark.parametrize("command", [PROVE, DEMO], ids=["prove", "demo"])
@pytest.mark.parametrize("output", ["closed pipe", "full disk"])
def test_the_work_is_finished_and_its_exit_code_is_the_true_one(command: dict, output: str, tmp_path: Path) -> None:
    if output == "closed pipe":
        reader, descriptor = os.pipe()
        os.close(reader)
    else:
        descriptor = os.open("/dev/full", os.O_WRONLY)
    argv = [sys.executable, "-c", PROGRAM.format(**command), str(tmp_path / "done"), str(tmp_path / "out")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    code = subprocess.run(argv, stdout=descriptor, stderr=descriptor, env=env, check=False, timeout=600).returncode
    os.close(descriptor)
    assert (tmp_path / "done").exists()
    assert code == 1  # not 0, which a command ends with whose reader has gone
