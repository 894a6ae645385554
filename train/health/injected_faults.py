"""Faults on purpose, for tests: by name, at a rank, a step and a phase of the loop. Nothing happens unless asked for.

The environment variable KEEPSTEP_FAULTS holds JSON:

    {"marks": FOLDER, "faults": [{"fault": "kill", "rank": 1, "step": 7, "phase": "forward"}, ...]}

A fault strikes where its rank enters its phase with `step` optimizer steps done, and only once in all attempts: a file
in FOLDER marks that it has.
"""

import ctypes
import errno
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel.engine import Engine

log = logging.getLogger(__name__)

VARIABLE = "KEEPSTEP_FAULTS"
SIGNALS = {
    "kill": signal.SIGKILL,
    "freeze": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
    "usr1": signal.SIGUSR1,
    "usr2": signal.SIGUSR2,
}
DAMAGES = ("truncated_shard", "flipped_shard", "missing_shard", "truncated_manifest", "flipped_manifest", "left_over")
WRITES = ("no_space", "io_error", "slow_write", "kill_in_write")
OTHERS = ("raise", "hang", "nan_gradient", "flipped_weight", "dead_data_thread", "clock_jump")
NAMES = (*SIGNALS, *DAMAGES, *WRITES, *OTHERS)


@dataclass(frozen=True)
class Fault:
    fault: str
    rank: int
    step: int
    phase: str
    mark: Path


class Faults:
    """This rank's faults that have not struck yet."""

    def __init__(self, env: Mapping[str, str], rank: int, checkpoints: Path) -> None:
        asked = json.loads(env.get(VARIABLE, "{}"))
        self._checkpoints = checkpoints
        self._engine: Any = None
        self._left: list[Fault] = []
        for number, described in enumerate(asked.get("faults", [])):
            fault = Fault(**described, mark=Path(asked["marks"]) / str(number))
            assert fault.fault in NAMES, fault
            if fault.rank == rank and not fault.mark.exists():
                self._left.append(fault)

    def arm(self, engine: Engine) -> None:
        """Tell which engine's numbers go wrong."""
        self._engine = engine

    def strike(self, phase: str, step: int) -> None:
        """This rank enters a phase."""
        for fault in [fault for fault in self._left if (fault.phase, fault.step) == (phase, step)]:
            self._left.remove(fault)
            fault.mark.touch(exist_ok=False)
            log.warning("fault on purpose: %s in phase %s after %d steps", fault.fault, phase, step)
            self._inject(fault.fault)

    def _inject(self, fault: str) -> None:
        if fault in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault])
        elif fault in DAMAGES:
            damage(self._checkpoints, fault)
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault in WRITES:
            _spoil_next_write(fault)
        elif fault == "raise":
            raise RuntimeError("a fault on purpose")
        elif fault == "hang":
            time.sleep(3600)
        elif fault == "nan_gradient":
            spoil_next_gradient(self._engine)
        elif fault == "flipped_weight":
            _flip_a_weight(self._engine)
        elif fault == "dead_data_thread":
            _end_thread("keepstep-prefetch")
        elif fault == "clock_jump":
            true_time = time.time
            time.time = lambda: true_time() - 7200.0


def damage(checkpoints: Path, fault: str) -> Path | None:
    """Harm the newest checkpoint as a bad disk or a careless hand would; the file. None if there is none yet."""
    found = sorted(checkpoints.glob("step-*"))
    if not found:
        return None
    newest = found[-1]
    if fault == "left_over":
        partial = newest.with_name(f".{newest.name}.partial-dead")
        shutil.copytree(newest, partial)
        (partial / "manifest.json").unlink()
        return partial
    path = newest / "manifest.json" if fault.endswith("manifest") else sorted(newest.glob("shard-*"))[0]
    size = path.stat().st_size
    if fault.startswith("truncated"):
        os.truncate(path, size - size // 3)
    elif fault.startswith("flipped"):
        with path.open("rb+") as file:
            file.seek(size - size // 5)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x10]))
    else:
        path.unlink()
    return path


def _spoil_next_write(fault: str) -> None:
    """The next file of a checkpoint that this process writes."""
    from train.checkpoint.stores.local import LocalFolder

    true_write = LocalFolder.write

    def write(self: Any, name: str, parts: Any) -> None:
        LocalFolder.write = true_write
        if fault == "kill_in_write":
            self.path.mkdir(exist_ok=True)
            (self.path / name).write_bytes(b"".join(bytes(part) for part in parts)[:-1000])
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "slow_write":
            time.sleep(2.0)
            true_write(self, name, parts)
            return
        number = errno.ENOSPC if fault == "no_space" else errno.EIO
        raise OSError(number, os.strerror(number), str(self.path / name))

    LocalFolder.write = write


def spoil_next_gradient(engine: Any) -> None:
    """One weight is not a number while the next gradients are computed, and is put back afterwards."""
    true_forward_backward = engine.forward_backward
    weight = _a_weight(engine)
    kept = weight.clone()

    def forward_backward(*arguments: Any, **options: Any) -> torch.Tensor:
        engine.forward_backward = true_forward_backward
        weight.fill_(float("nan"))
        try:
            return true_forward_backward(*arguments, **options)
        finally:
            weight.copy_(kept)

    engine.forward_backward = forward_backward


def _flip_a_weight(engine: Any) -> None:
    """One bit of one weight in this rank's memory, as a cosmic ray or a bad core would."""
    _a_weight(engine).view(torch.int32).bitwise_xor_(1 << 12)


def _a_weight(engine: Any) -> torch.Tensor:
    """The first element that this rank holds of the last weight by name (the last norm's), shape (1,)."""
    tensors = engine.state()
    last = tensors[max(name for name in tensors if name.startswith("model."))]
    local = last.to_local() if hasattr(last, "to_local") else last
    return local.view(-1)[:1]


def _end_thread(name: str) -> None:
    """As an error that nobody foresaw in a thread whose name starts so."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(name)]
    assert threads, f"no thread is called {name}: {[thread.name for thread in threading.enumerate()]}"
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(MemoryError))
