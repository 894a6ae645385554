"""The live view on a pseudo-terminal, as a small screen shows it."""

import contextlib
import os
import pty
import re
import sys
from pathlib import Path

import pytest

from train.records.live_view import LiveView

ROOT = Path(__file__).parents[3]
RECORD = {
    "loss": 3.25, "lr": 1e-3, "grad_norm": 1.5, "tokens_per_second": 12345.6, "mfu": 0.41,
    "share_of_measured_peak": 0.5, "memory_gib": 2.0, "seconds": {"start": 5.0, "step": 15.0},
}  # fmt: skip
PROGRAM = f"""
import logging, os, sys
from train.health.safe_output import protect_output
from train.records import live_view

protect_output()
live_view.DRAW_SECONDS = 0.0
logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[logging.StreamHandler(sys.stderr)])
view = live_view.LiveView(4)
for step in range(1, 4):
    logging.info("whole line %d " + "=" * 60, step)
    view.show(step, {RECORD!r}, 2.0)
END
"""


class Screen:
    """What a terminal of 200 columns shows of the control sequences that the view and rich write."""

    def __init__(self, output: str) -> None:
        self.lines: list[str] = [""]
        self.row = self.column = 0
        for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
            self._obey(part)

    def _obey(self, part: str) -> None:
        if part == "\r":
            self.column = 0
        elif part == "\n":
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        elif part == "\x1b[J":
            self.lines[self.row] = self.lines[self.row][: self.column]
            self.lines[self.row + 1 :] = []
        elif up := re.fullmatch(r"\x1b\[(\d+)A", part):
            self.row -= int(up[1])
        elif not part.startswith("\x1b"):
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + part + line[self.column + len(part) :]
            self.column += len(part)


def shown(end: str = "") -> list[str]:
    """The screen after the program has ended."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "200", "NO_COLOR": ""}
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM.replace("END", end)])
    output = b""
    with contextlib.suppress(OSError):  # the terminal's end
        while data := os.read(terminal, 65_536):
            output += data
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, output.decode()
    os.close(terminal)
    return [line.rstrip() for line in Screen(output.decode()).lines]


def test_the_view_is_once_below_whole_log_lines() -> None:
    *messages, bar, values = shown()
    assert messages == [f"whole line {step} " + "=" * 60 for step in (1, 2, 3)]
    assert re.fullmatch(r"[━╸╺ ]+ step 3 of 4 \(75%\)  0\.5 steps/s, 00:00:02 left", bar)
    assert values == "loss 3.2500  lr 1.00e-03  grad norm 1.500  tokens/s 12,346  MFU 41.0%  GiB 2.00  goodput 75%"


def test_a_message_of_another_process_begins_where_the_view_was() -> None:
    lines = shown(f'os.write(2, b"\\r\\x1b[Jfrom the launcher\\n")\nview.show(4, {RECORD}, 2.0)')
    assert lines[3] == "from the launcher"
    assert lines[4].endswith("step 4 of 4 (100%)  0.5 steps/s, 00:00:00 left")
    assert len(lines) == 6


def test_a_view_that_is_closed_leaves_nothing() -> None:
    assert shown(f"view.close(); view.show(4, {RECORD}, 2.0)")[3:] == [""]


def test_an_error_of_the_view_switches_it_off_and_ends_nothing() -> None:
    lines = shown(f'view._layout = None\nview.show(4, {RECORD}, 2.0)\nprint("goes on", file=sys.stderr)')
    assert lines[3].startswith("the live view is switched off: TypeError")
    assert lines[4] == "goes on"


def test_an_output_that_is_no_terminal_gets_no_view(capsys: pytest.CaptureFixture[str]) -> None:
    view = LiveView(4)
    view.show(1, RECORD, 2.0)
    view.close()
    assert capsys.readouterr() == ("", "")
