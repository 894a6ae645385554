"""Faults injected for tests: by name, at a rank, a step and a phase of the loop. By default nothing is injected.

The environment variable KEEPSTEP_FAULTS holds JSON:

    {"marks": FOLDER, "faults": [{"fault": "kill", "rank": 1, "step": 7, "phase": "forward"}, ...]}

A fault is injected when its rank enters its phase with `step` optimizer steps finished. It is injected once over all
attempts of the run: a file in FOLDER, named by the fault's number in the list, marks it as done.
"""

import ctypes
import errno
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

from data_pipeline.untrusted import parse_json
from parallel.engine import Engine
from train.checkpoint.stores.steps import newest_step, step_name
from train.errors import ConfigError

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
    """One fault to inject."""

    fault: str
    """One of NAMES."""
    rank: int
    step: int
    """Optimizer steps finished when the fault is injected."""
    phase: str
    mark: Path
    """File that exists once the fault has been injected."""


class FaultInjector:
    """This rank's faults that have not been injected yet.

    `env`: the environment, which may hold the variable KEEPSTEP_FAULTS. `checkpoints`: the run's checkpoint folder.
    ConfigError if the variable does not describe faults."""

    def __init__(self, env: Mapping[str, str], rank: int, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._engine: Any = None
        requested = _requested(env.get(VARIABLE, "{}"))
        self._pending = [fault for fault in requested if fault.rank == rank and not fault.mark.exists()]

    def attach(self, engine: Engine) -> None:
        """Set the engine whose gradients and weights the faults corrupt."""
        self._engine = engine

    def inject(self, phase: str, step: int) -> None:
        """Inject the faults that are due as this rank enters a phase with `step` optimizer steps finished."""
        for fault in [fault for fault in self._pending if (fault.phase, fault.step) == (phase, step)]:
            self._pending.remove(fault)
            fault.mark.touch(exist_ok=False)
            log.warning("injected fault: %s in phase %s after %d steps", fault.fault, phase, step)
            self._apply(fault.fault)

    def _apply(self, fault: str) -> None:
        if fault in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault])
        elif fault in DAMAGES:
            damage_newest_checkpoint(self._checkpoints, fault)
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault in WRITES:
            _fail_next_write(fault)
        elif fault == "raise":
            raise RuntimeError("injected fault")
        elif fault == "hang":
            time.sleep(3600)
        elif fault == "nan_gradient":
            corrupt_next_gradient(self._engine)
        elif fault == "flipped_weight":
            _flip_weight_bit(self._engine)
        elif fault == "dead_data_thread":
            _raise_in_threads("keepstep-prefetch")
        elif fault == "clock_jump":
            original_time = time.time
            time.time = lambda: original_time() - 7200.0


def _requested(text: str) -> list[Fault]:
    """The faults that the variable describes. ConfigError if it describes none."""
    try:
        request = parse_json(text.encode("utf-8", "surrogateescape"))
        described: list[dict[str, Any]] = request.get("faults", [])
        faults = [Fault(**fields, mark=Path(request["marks"]) / str(number)) for number, fields in enumerate(described)]
        unknown = [fault.fault for fault in faults if fault.fault not in NAMES]
        if unknown or any("\0" in str(fault.mark) for fault in faults):
            raise ValueError(f"the faults are {', '.join(NAMES)}, not {str(unknown)[:100]}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{VARIABLE} ({text[:100]!r}) does not describe faults ({str(error)[:300]!r}); unset it, or see "
            "train/health/injected_faults.py"
        ) from None
    return faults


def damage_newest_checkpoint(checkpoints: Path, fault: str) -> Path | None:
    """Damage the newest checkpoint as a bad disk or a user's mistake would.

    Returns the damaged file, or None if there is no checkpoint yet. `fault`: one of DAMAGES."""
    step = newest_step(checkpoints)
    if step is None:
        return None
    newest = checkpoints / step_name(step)
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


def _fail_next_write(fault: str) -> None:
    """Make this process fail in, or be slow with, the next checkpoint file that it writes."""
    from train.checkpoint.stores.local import LocalFolder

    original_write = LocalFolder.write

    def write(self: Any, name: str, parts: Any) -> None:
        LocalFolder.write = original_write
        if fault == "kill_in_write":
            self.path.mkdir(exist_ok=True)
            (self.path / name).write_bytes(b"".join(bytes(part) for part in parts)[:-1000])
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "slow_write":
            time.sleep(2.0)
            original_write(self, name, parts)
            return
        number = errno.ENOSPC if fault == "no_space" else errno.EIO
        raise OSError(number, os.strerror(number), str(self.path / name))

    LocalFolder.write = write


def corrupt_next_gradient(engine: Any) -> None:
    """Set one weight to NaN while the next gradients are computed, and restore it afterwards."""
    original_forward_backward = engine.forward_backward
    weight = _last_weight(engine)
    saved = weight.clone()

    def forward_backward(*arguments: Any, **options: Any) -> torch.Tensor:
        engine.forward_backward = original_forward_backward
        weight.fill_(float("nan"))
        try:
            return original_forward_backward(*arguments, **options)
        finally:
            weight.copy_(saved)

    engine.forward_backward = forward_backward


def _flip_weight_bit(engine: Any) -> None:
    """Flip one bit of one weight in this rank's memory, as a cosmic ray or a faulty core would."""
    _last_weight(engine).view(torch.int32).bitwise_xor_(1 << 12)


def _last_weight(engine: Any) -> torch.Tensor:
    """This rank's first element of the weight whose name sorts last (the final norm's). Shape (1,)."""
    tensors = engine.state()
    last = tensors[max(name for name in tensors if name.startswith("model."))]
    local = last.to_local() if hasattr(last, "to_local") else last
    return local.view(-1)[:1]


def _raise_in_threads(prefix: str) -> None:
    """Raise MemoryError in every thread whose name starts with `prefix`, like an unforeseen error."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]
    assert threads, f"no thread is called {prefix}: {[thread.name for thread in threading.enumerate()]}"
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(MemoryError))
