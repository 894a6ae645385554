"""Run by test_faults.py: one saver is killed (SIGKILL) before and after each of its calls to the file system.

    python kill_saves.py FOLDER STEP RANKS VICTIM

A complete checkpoint of step 1 exists. RANKS forks save STEP (2, or 1 again), and the one of rank VICTIM is killed at
its n-th call. Then another fork loads the newest checkpoint and saves step 3. Prints one line of JSON for each n: the
calls, the step that loaded, whether its tensors were right, and what was in the folder at the end.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.config import CheckpointConfig

CALLS = ("mkdir", "open", "write", "fsync", "rename", "close", "unlink", "rmdir")


def state(step: int) -> dict[str, torch.Tensor]:
    return {f"model.{i}": torch.full((50, 3), float(10 * step + i)) for i in range(3)}


def manager(folder: Path) -> CheckpointManager:
    config = CheckpointConfig(background=False, keep_last=1)
    return CheckpointManager(folder, config, {}, lambda *_, **__: None, timeout_seconds=60.0)


def save(folder: Path, step: int, rank: int = 0, ranks: int = 1, before: Callable[[], None] = lambda: None) -> None:
    """Save one step. `before` is called when the rank is ready to save."""
    if ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}.store", ranks), rank=rank, world_size=ranks)
    saver = manager(folder)
    before()
    saver.save(SavedProgress(step, step), state(step), {"step": step})


def in_forks(*actions: Callable[[], Any]) -> list[int]:
    """Run each action in a fork of its own; returns their exit codes, negative where a signal ended the fork."""
    children = []
    for action in actions:
        if not (child := os.fork()):
            code = 1
            try:
                action()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def die_at(number: int, after: bool, trace: int) -> None:
    """Count calls to the file system and kill this process at call `number`. The pipe `trace` gets each call's name."""
    count = 0

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            this = count
            if this == number and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*args, **kwargs)
            finally:
                real_write(trace, f"{name}\n".encode())
                if this == number and after:
                    os.kill(os.getpid(), signal.SIGKILL)

        return counted

    real_write = os.write
    for name in CALLS:
        setattr(os, name, wrapped(name, getattr(os, name)))


def load_and_save(folder: Path, report: Path) -> None:
    fresh = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
    finder = manager(folder)
    loaded = finder.load_newest(fresh)
    assert loaded is not None
    step = loaded.progress.step
    right = all(torch.equal(fresh[name], tensor) for name, tensor in state(step).items())
    finder.save(SavedProgress(3, 3), state(3), {})
    left = sorted(path.name for path in folder.iterdir())
    report.write_text(json.dumps({"step": step, "right": right, "rank_states": loaded.rank_states, "left": left}))


def trial(folder: Path, step: int, ranks: int, victim: int, number: int, after: bool) -> dict[str, Any]:
    run = folder / f"{number}-{after}"
    shutil.copytree(folder / "start", run)
    reading, writing = os.pipe()
    arm = partial(die_at, number, after, writing)
    saves = [partial(save, run, step, rank, ranks, *[arm] * (rank == victim)) for rank in range(ranks)]
    code = in_forks(*saves)[victim]
    os.close(writing)
    with os.fdopen(reading) as pipe:
        calls = pipe.read().split()
    assert in_forks(lambda: load_and_save(run, folder / "report.json")) == [0]
    found = json.loads((folder / "report.json").read_text())
    shutil.rmtree(run)
    return {"number": number, "after": after, "killed": code == -signal.SIGKILL, "calls": calls} | found


def main(folder: Path, step: int, ranks: int, victim: int) -> None:
    assert in_forks(lambda: save(folder / "start", 1)) == [0]
    number, going = 0, True
    while going:
        number += 1
        for after in (False, True):
            result = trial(folder, step, ranks, victim, number, after)
            print(json.dumps(result), flush=True)
            going = result["killed"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
