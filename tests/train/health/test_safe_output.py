"""Output that cannot be written is dropped, and the process goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.health.safe_output import protect_output

PROGRAM = """
import logging, os, sys
from train.health.safe_output import protect_output
protect_output()
logging.basicConfig(stream=sys.stderr)
sys.stdin.readline()          # until the other end of the pipe is closed
for _ in range(3):
    print("out", flush=True)
    print("x" * 100_000)
    print("err", file=sys.stderr)
    logging.warning("logged")
open(sys.argv[1], "w").write("went on")
"""


def run_with(descriptor: int, file: Path) -> int:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(file)], stdin=subprocess.PIPE, stdout=descriptor, stderr=descriptor
    )
    os.close(descriptor)
    program.communicate(b"\n", timeout=600)
    return program.returncode


def test_a_closed_pipe_does_not_end_the_process(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert run_with(writer, tmp_path / "file") == 0
    assert (tmp_path / "file").read_text() == "went on"


def test_a_full_disk_does_not_end_the_process(tmp_path: Path) -> None:
    assert run_with(os.open("/dev/full", os.O_WRONLY), tmp_path / "file") == 0
    assert (tmp_path / "file").read_text() == "went on"


def test_descriptors_that_were_closed_before_the_start_are_no_error(tmp_path: Path) -> None:
    argv = ["sh", "-c", '"$@" >&- 2>&-', "sh", sys.executable, "-c", PROGRAM, str(tmp_path / "file")]
    assert subprocess.run(argv, input=b"\n", check=False).returncode == 0
    assert (tmp_path / "file").read_text() == "went on"


def test_output_that_can_be_written_is_the_same(tmp_path: Path) -> None:
    code = "from train.health.safe_output import protect_output as p; p(); import sys"
    code += "; print('é', end=''); sys.stderr.write('b')"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (shown.stdout, shown.stderr) == ("é", "b")


def test_streams_that_a_program_has_replaced_stay(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    protect_output()
    assert (sys.stdout, sys.stderr) == before
