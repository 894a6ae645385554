"""Run by test_faults.py: faults of one rank of two, on real gloo ranks, and two savers in one folder.

    python fault_ranks.py FOLDER SCENARIO

Prints one line of JSON per rank: the events it would have recorded (rank 0 alone does), what loaded afterwards, and
how long a failed save took to be seen.
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
TIMEOUT_SECONDS = 2.0


class Rank:
    """One of two ranks, with a manager whose events it keeps."""

    def __init__(self, folder: Path, rank: int, layout: str = "two") -> None:
        self.folder, self.rank = folder, rank
        self.events: list[dict[str, Any]] = []
        self.manager = CheckpointManager(
            folder, CheckpointConfig(), {}, self._record, layout={"name": layout}, timeout_seconds=TIMEOUT_SECONDS
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

    def tell(self, **more: Any) -> None:
        line = json.dumps({"rank": self.rank, "events": self.events} | more) + "\n"
        os.write(sys.stdout.fileno(), line.encode())  # at once: two ranks share the pipe


def full_disk(rank: Rank) -> None:
    """Rank 1's disk is full in the second save; the third goes well again."""
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
    rank.tell(left=left, loaded=rank.load())


def small_disk(rank: Rank) -> None:
    """A real file system without a free block in the second save; the third, with room again, goes well."""
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
    rank.tell(left=left, loaded=rank.load())


def killed(rank: Rank) -> None:
    """Rank 1 dies in the middle of the second save."""
    rank.save(1)
    rank.manager.wait()
    if rank.rank == 1:
        LocalFolder.write = _call(lambda: os.kill(os.getpid(), signal.SIGKILL))
    rank.save(2)
    _see_failure(rank)


def frozen(rank: Rank) -> None:
    """Rank 1 stops answering in the middle of the second save."""
    rank.save(1)
    rank.manager.wait()
    if rank.rank == 1:
        LocalFolder.write = _call(lambda: time.sleep(3 * TIMEOUT_SECONDS))
    rank.save(2)
    _see_failure(rank)


def missing_shard(rank: Rank) -> None:
    """The shard of rank 1 is gone from the newest checkpoint: both ranks take the one before."""
    for step in (1, 2):
        rank.save(step)
        rank.manager.wait()
    if rank.rank == 0:
        (rank.folder / "step-00000002" / "shard-00001.safetensors").unlink()
    dist.barrier()
    rank.tell(loaded=rank.load(), left=sorted(path.name.split("-0")[0] for path in rank.folder.iterdir()))


def another_run(rank: Rank) -> None:
    """Only rank 1 has a tensor of another shape: both ranks refuse."""
    rank.save(1)
    rank.manager.wait()
    state = rank.state(0)
    if rank.rank == 1:
        state["model.3"] = torch.zeros(65, 5)
    try:
        rank.manager.load_newest(state)
    except CheckpointError as error:
        rank.tell(error=str(error))


def two_savers(rank: Rank) -> None:
    """Two runs of one rank each save the same steps into one folder at the same time; both load when both are done."""
    for step in range(1, 9):
        rank.save(step)
        rank.manager.wait()
    done = [rank.folder.parent / f"done.{number}" for number in range(RANKS)]
    done[rank.rank].touch()
    while not all(path.exists() for path in done):
        time.sleep(0.01)
    rank.tell(loaded=rank.load())


def _see_failure(rank: Rank) -> None:
    """Rank 0 polls as a training loop would; rank 1 is dead or does not answer."""
    began = time.monotonic()
    if rank.rank == 1:
        time.sleep(3 * TIMEOUT_SECONDS)
        os._exit(0)
    while rank.events[-1]["kind"] != "save_failed":
        rank.manager.poll()
        time.sleep(0.01)
    seconds = time.monotonic() - began
    left = sorted(path.name for path in rank.folder.iterdir())
    rank.tell(seconds=seconds, left=left)
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
    SCENARIOS[scenario](Rank(folder, rank))


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
