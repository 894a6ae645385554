"""Run by test_faults.py: a fault on one rank of two real gloo ranks, and two savers in one folder.

    python fault_ranks.py FOLDER SCENARIO

Each rank prints one line of JSON: the events that it received (only rank 0 records events) and what loaded afterwards.
"""

import contextlib
import errno
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.checkpoint.stores.local import LocalFolder
from train.config import CheckpointConfig
from train.errors import CheckpointError

RANKS = 2
TIMEOUT_SECONDS = {"frozen": 5.0}
"""Longest wait for the other rank by scenario, where it matters. A busy machine delays a rank by seconds."""


class Rank:
    """One of two ranks, with a manager and a list of its events."""

    def __init__(self, folder: Path, rank: int, layout: str = "two", timeout_seconds: float = 600.0) -> None:
        self.folder, self.rank = folder, rank
        self.events: list[dict[str, Any]] = []
        self.manager = CheckpointManager(
            folder, CheckpointConfig(), {}, self._record, layout={"name": layout}, timeout_seconds=timeout_seconds
        )

    def _record(self, kind: str, **details: Any) -> None:
        self.events.append({"kind": kind} | details)

    def state(self, step: int) -> dict[str, torch.Tensor]:
        return {f"model.{i}": torch.full((64, 4), float(10 * step + i)) for i in range(4)}

    def save(self, step: int) -> None:
        self.manager.save(SavedProgress(step, step), self.state(step), {"rank": self.rank})

    def load(self) -> dict[str, Any]:
        fresh = self.state(0)
        try:
            loaded = self.manager.load_newest(fresh)
        except CheckpointError as error:
            return {"error": str(error)}
        assert loaded is not None
        expected = self.state(loaded.progress.step)
        right = all(torch.equal(fresh[name], expected[name]) for name in fresh)
        return {"step": loaded.progress.step, "right": right, "rank_states": loaded.rank_states}

    def report(self, **more: Any) -> None:
        line = json.dumps({"rank": self.rank, "events": self.events} | more) + "\n"
        os.write(sys.stdout.fileno(), line.encode())  # in one write: two ranks share the pipe


def full_disk(rank: Rank) -> None:
    """Rank 1's disk is full during the second save and has space again for the third."""
    rank.save(1)
    rank.manager.wait()
    write = LocalFolder.write
    if rank.rank == 1:
        LocalFolder.write = _raise(OSError(errno.ENOSPC, "No space left on device"))
    rank.save(2)
    rank.manager.wait()
    LocalFolder.write = write
    left = sorted(path.name for path in rank.folder.iterdir())
    rank.save(3)
    rank.manager.wait()
    rank.report(left=left, loaded=rank.load())


def small_disk(rank: Rank) -> None:
    """A real file system has no free block during the second save and has space again for the third."""
    rank.save(1)
    rank.manager.wait()
    filler = rank.folder / "filler"
    if rank.rank == 0:
        _fill(filler)
    dist.barrier()
    rank.save(2)
    rank.manager.wait()
    left = sorted(path.name for path in rank.folder.iterdir())
    dist.barrier()
    filler.unlink(missing_ok=True)
    rank.save(3)
    rank.manager.wait()
    rank.report(left=left, loaded=rank.load())


def killed(rank: Rank) -> None:
    """Rank 1 is killed in the middle of the second save."""
    rank.save(1)
    rank.manager.wait()
    if rank.rank == 1:
        LocalFolder.write = _call(lambda: os.kill(os.getpid(), signal.SIGKILL))
    rank.save(2)
    _report_failure(rank)


def frozen(rank: Rank) -> None:
    """Rank 1 hangs in the middle of the second save."""
    rank.save(1)
    rank.manager.wait()
    if rank.rank == 1:
        LocalFolder.write = _call(lambda: time.sleep(3600))
    rank.save(2)
    _report_failure(rank)


def missing_shard(rank: Rank) -> None:
    """The shard of rank 1 is missing from the newest checkpoint, so both ranks load the one before."""
    for step in (1, 2):
        rank.save(step)
        rank.manager.wait()
    if rank.rank == 0:
        (rank.folder / "step-00000002" / "shard-00001.safetensors").unlink()
    dist.barrier()
    rank.report(loaded=rank.load(), left=sorted(path.name.split("-0")[0] for path in rank.folder.iterdir()))


def another_run(rank: Rank) -> None:
    """Only rank 1 has a tensor of another shape; both ranks refuse the checkpoint."""
    rank.save(1)
    rank.manager.wait()
    state = rank.state(0)
    if rank.rank == 1:
        state["model.3"] = torch.zeros(65, 5)
    try:
        rank.manager.load_newest(state)
    except CheckpointError as error:
        rank.report(error=str(error))


def two_savers(rank: Rank) -> None:
    """Two runs of one rank each save the same steps to one folder at the same time; both load when both are done."""
    for step in range(1, 9):
        rank.save(step)
        rank.manager.wait()
    done = [rank.folder.parent / f"done.{number}" for number in range(RANKS)]
    done[rank.rank].touch()
    while not all(path.exists() for path in done):
        time.sleep(0.01)
    rank.report(loaded=rank.load())


def _report_failure(rank: Rank) -> None:
    """Rank 0 polls as the training loop does; rank 1 is dead or hangs until rank 0 has reported."""
    reported = rank.folder.parent / "reported"
    if rank.rank == 1:
        while not reported.exists():
            time.sleep(0.01)
        os._exit(0)
    while rank.events[-1]["kind"] != "save_failed":
        rank.manager.poll()
        time.sleep(0.01)
    rank.report(left=sorted(path.name for path in rank.folder.iterdir()))
    reported.touch()
    os._exit(0)


def _fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def _raise(error: Exception) -> Any:
    def write(self: LocalFolder, name: str, parts: Any) -> None:
        raise error

    return write


def _call(action: Callable[[], object]) -> Any:
    def write(self: LocalFolder, name: str, parts: Any) -> None:
        action()

    return write


SCENARIOS = {f.__name__: f for f in (full_disk, small_disk, killed, frozen, missing_shard, another_run, two_savers)}


def run_rank(folder: Path, scenario: str, rank: int) -> None:
    if scenario == "two_savers":
        two_savers(Rank(folder, rank))
        return
    store = dist.FileStore(str(folder.parent / f"{scenario}.store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    SCENARIOS[scenario](Rank(folder, rank, timeout_seconds=TIMEOUT_SECONDS.get(scenario, 600.0)))


def fork_ranks(folder: Path, scenario: str) -> None:
    children = []
    for rank in range(RANKS):
        if not (child := os.fork()):
            try:
                run_rank(folder, scenario, rank)
            except BaseException:
                print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    sys.exit(1 if 1 in codes else 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(Path(sys.argv[1]), sys.argv[2])
