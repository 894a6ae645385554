import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from train.health.stop import NOHUP, SIGNALS, StopRequest

RANK = """
import os, sys
from train.health.stop import StopRequest
stop = StopRequest()
stop.install()
print("ready", flush=True)
while not stop:
    pass
print(stop.reason, flush=True)
sys.stdin.readline()   # stands for the save, during which more signals arrive
print(stop.reason, flush=True)
"""


def with_hangup(heard: bool) -> Callable[[], None]:
    """Return what a process does before it starts a program: hear or ignore SIGHUP, whatever the tests do."""
    return lambda: (signal.signal(signal.SIGHUP, signal.SIG_DFL if heard else signal.SIG_IGN), None)[1]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_each_stop_signal_sets_the_flag_and_later_signals_change_nothing(number: signal.Signals) -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdin=-1, stdout=-1, text=True, preexec_fn=with_hangup(True))
    assert rank.stdin
    assert rank.stdout
    assert rank.stdout.readline() == "ready\n"
    rank.send_signal(number)
    assert rank.stdout.readline() == f"{number.name}\n"
    for again in (number, signal.SIGTERM, signal.SIGINT):
        rank.send_signal(again)
    rest, _ = rank.communicate("saved\n", timeout=600)
    assert rest == f"{number.name}\n"
    assert rank.returncode == 0


@pytest.mark.parametrize(
    ("heard", "told", "asks_to_stop"),
    [(True, None, True), (False, None, False), (False, "0", True), (False, "1", False)],
)
def test_nohup_is_respected_also_by_ranks_whose_launcher_ignores_signals(
    heard: bool, told: str | None, asks_to_stop: bool
) -> None:
    code = "from train.health.stop import *; print(signal.SIGHUP in stop_signals(), signal.SIGTERM in stop_signals())"
    env = {name: value for name, value in os.environ.items() if name != NOHUP} | ({NOHUP: told} if told else {})
    shown = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, preexec_fn=with_hangup(heard)
    )
    assert shown.stdout == f"{asks_to_stop} True\n"


def test_a_stop_file_is_a_request_to_stop(tmp_path: Path) -> None:
    stop = StopRequest(tmp_path / "STOP")
    assert not stop
    (tmp_path / "STOP").touch()
    assert stop
    assert stop.reason == "STOP file"


def test_a_request_remains_when_its_file_is_removed(tmp_path: Path) -> None:
    stop = StopRequest(tmp_path / "STOP")
    (tmp_path / "STOP").touch()
    assert stop
    (tmp_path / "STOP").unlink()
    assert stop


def test_the_clock_starts_before_torch_is_imported() -> None:
    code = "import sys, train.__main__; print('train.records.clock' in sys.modules, 'torch' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert shown.stdout == "True False\n"
