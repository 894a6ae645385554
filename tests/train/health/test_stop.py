import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from train.health.stop import SIGNALS, StopRequest

RANK = """
import os, sys
from train.health.stop import StopRequest
stop = StopRequest()
stop.install()
print("ready", flush=True)
while not stop:
    pass
print(stop.reason, flush=True)
sys.stdin.readline()   # the save, during which a second signal comes
print(stop.reason, flush=True)
"""


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_each_stop_signal_sets_the_flag_and_a_second_one_is_harmless(number: signal.Signals) -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdin=-1, stdout=-1, text=True)
    assert rank.stdin
    assert rank.stdout
    assert rank.stdout.readline() == "ready\n"
    rank.send_signal(number)
    assert rank.stdout.readline() == f"{number.name}\n"
    for again in (number, signal.SIGTERM, signal.SIGINT):
        rank.send_signal(again)
    rest, _ = rank.communicate("saved\n", timeout=30)
    assert rest == f"{number.name}\n"
    assert rank.returncode == 0


def test_a_stop_file_is_a_request(tmp_path: Path) -> None:
    stop = StopRequest(tmp_path / "STOP")
    assert not stop
    (tmp_path / "STOP").touch()
    assert stop
    assert stop.reason == "STOP file"


def test_a_request_stays_when_its_file_is_gone(tmp_path: Path) -> None:
    stop = StopRequest(tmp_path / "STOP")
    (tmp_path / "STOP").touch()
    assert stop
    (tmp_path / "STOP").unlink()
    assert stop


def test_handlers_stand_and_the_clock_runs_before_torch_is_imported() -> None:
    code = "import sys, train.__main__; print('train.records.clock' in sys.modules, 'torch' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert shown.stdout == "True False\n"
