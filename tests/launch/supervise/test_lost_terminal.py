"""A run whose output goes away, on real pseudo-terminals: the terminal is closed, or `tee` ends first."""

import contextlib
import json
import os
import pty
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from train.checkpoint.stores.steps import newest_step
from train.health.stop import SIGNALS
from train.records.jsonl import read_jsonl

ROOT = Path(__file__).parents[3]
RECIPE = {
    "name": "run",
    "model": {"vocab_size": 512, "seq_len": 32, "n_layers": 1, "n_heads": 2, "d_model": 16},
    "data": {"sources": [{"path": str(ROOT / "tests/earlier_version/data")}]},
    "optim": {"lr": 1e-3, "warmup_steps": 2},
    "train": {"steps": 1_000_000, "global_batch_size": 2, "micro_batch_size": 2, "log_every": 1},
    "parallel": {"engine": "single", "device": "cpu", "precision": "fp32"},
    "checkpoint": {"every": 1_000_000},
}


class Shell:
    """A shell command on a pseudo-terminal of its own that starts the run, like one that a person typed."""

    def __init__(self, folder: Path, command: str) -> None:
        recipe = folder / "recipe.json"
        recipe.write_text(json.dumps(RECIPE | {"runs_dir": str(folder)}))
        self.run = folder / "run"
        keepstep = shlex.join([sys.executable, "-m", "launch.cli", "run", str(recipe)])
        script = f"cd {shlex.quote(str(folder))}; {command.format(keepstep)}; true"
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            for number in SIGNALS:  # whatever the tests themselves were started with
                signal.signal(number, signal.SIG_DFL)
            os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            os.execvp("bash", ["bash", "-c", script])
        self.shown = b""
        self._closed = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed.is_set():
                if select.select([self.terminal], [], [], 0.1)[0]:
                    self.shown += os.read(self.terminal, 65_536)
        os.close(self.terminal)

    def events(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.run / "events.jsonl"))

    def steps(self) -> int:
        return sum(1 for _ in read_jsonl(self.run / "metrics.jsonl"))

    def wait_until(self, condition: Any) -> None:
        deadline = time.monotonic() + 600
        while not condition():
            assert time.monotonic() < deadline, (self.shown.decode(errors="replace"), self.events())
            time.sleep(0.05)

    def close_terminal(self) -> None:
        """Make the terminal go away, as a lost connection does: the end that a person looks at is closed."""
        self._closed.set()


def processes(run: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("KEEPSTEP_RUN") == str(run.resolve()):
                found.append(process)
    return found


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Any]:
    yield lambda command: Shell(tmp_path, command)
    for process in processes(tmp_path / "run"):
        process.kill()


def assert_saved(shell: Shell, reason: str) -> None:
    shell.wait_until(lambda: shell.events()[-1]["kind"] in ("stopped", "failed") and not processes(shell.run))
    last = shell.events()[-1]
    assert (last["kind"], last.get("reason")) == ("stopped", reason), shell.events()
    assert newest_step(shell.run / "checkpoints") == last["step"]


@pytest.mark.parametrize("command", ["{}", "{} 2>&1 | cat"])
def test_a_run_whose_terminal_is_closed_saves_and_stops(shells: Any, command: str) -> None:
    shell = shells(command)
    shell.wait_until(lambda: shell.steps() >= 3)
    shell.close_terminal()
    assert_saved(shell, "SIGHUP")


def test_ctrl_c_that_also_ends_tee_saves_and_stops(shells: Any) -> None:
    shell = shells("{} 2>&1 | tee log")
    shell.wait_until(lambda: b"step 3/" in shell.shown)
    os.write(shell.terminal, b"\x03")
    assert_saved(shell, "SIGINT")


def test_a_run_under_nohup_outlives_its_terminal(shells: Any) -> None:
    shell = shells("nohup {} >log 2>&1")
    shell.wait_until(lambda: shell.steps() >= 3)
    shell.close_terminal()
    shell.wait_until(lambda: not psutil.pid_exists(shell.pid) or psutil.Process(shell.pid).status() == "zombie")
    before = shell.steps()
    shell.wait_until(lambda: shell.steps() > before + 20)
    assert shell.events()[-1]["kind"] != "stopped"
    (shell.run / "STOP").touch()
    assert_saved(shell, "STOP file")
