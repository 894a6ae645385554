"""Run by test_local_tier.py: three ranks, each on a node of its own with its own folder for the fast tier.

    python tier_ranks.py FOLDER SCENARIO...

Each rank has a third of one tensor as a flat fragment. The first attempt saves step 1 to the shared folder and steps 2
and 3 to the fast tier. Then SCENARIO damages something, and the second attempt reports what loads.
"""

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.fragments import FlatFragment
from train.checkpoint.local_tier import run_name
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.config import CheckpointConfig
from train.errors import CheckpointError

RANKS, SHARE = 3, 50


def state(step: int, rank: int) -> dict[str, Any]:
    flat = torch.arange(rank * SHARE, (rank + 1) * SHARE, dtype=torch.float32) + 1000 * step
    return {
        "model.w": FlatFragment(flat, (RANKS * SHARE // 10, 10), rank * SHARE),
        "model.b": torch.tensor(float(step)),
    }


def manager(folder: Path, rank: int, events: list) -> CheckpointManager:
    config = CheckpointConfig(local_dir=str(folder / f"node-{rank}"))
    return CheckpointManager(
        folder / "shared", config, {}, lambda kind, **d: events.append([kind, d]), layout={"ranks": RANKS}
    )


def first_attempt(folder: Path, rank: int) -> None:
    events: list = []
    saver = manager(folder, rank, events)
    for step in (1, 2, 3):
        saver.save(SavedProgress(step, step), state(step, rank), {"rank": rank}, local=step > 1)
        saver.wait()
    saver.close()
    assert [kind for kind, _ in events] == (["saved"] * 3 if rank == 0 else []), events


def second_attempt(folder: Path, rank: int) -> None:
    events: list = []
    finder = manager(folder, rank, events)
    fresh = state(0, rank)
    try:
        loaded = finder.load_newest(fresh)
    except CheckpointError as error:
        line = {"scenario": folder.name, "rank": rank, "error": str(error)}
        os.write(sys.stdout.fileno(), (json.dumps(line) + "\n").encode())
        finder.close()
        return
    assert loaded is not None
    step = loaded.progress.step
    right = torch.equal(fresh["model.w"].flat, state(step, rank)["model.w"].flat) and fresh["model.b"] == step
    finder.save(SavedProgress(9, 9), state(9, rank), {"rank": rank}, local=True)
    finder.close()
    line = {
        "scenario": folder.name,
        "rank": rank,
        "step": step,
        "right": bool(right),
        "local": "node-" in loaded.path,
        "rank_states": loaded.rank_states,
        "events": events,
        "bytes_read": loaded.bytes_read,
    }
    os.write(sys.stdout.fileno(), (json.dumps(line) + "\n").encode())


def shards(folder: Path, rank: int, step: int = 3) -> list[Path]:
    return sorted(folder.glob(f"node-{rank}/*/step-{step:08d}/shard-*"))


def nothing(folder: Path) -> None:
    assert [path.name[6:11] for path in shards(folder, 1)] == ["00000", "00001"]  # its own and that of the node before


def lose_one(folder: Path) -> None:
    shutil.rmtree(folder / "node-1")


def lose_two(folder: Path) -> None:
    shutil.rmtree(folder / "node-1")
    shutil.rmtree(folder / "node-2")


def damage(folder: Path) -> None:
    path = shards(folder, 0)[0]
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)


def lose_a_shard(folder: Path) -> None:
    """Both copies of one shard of step 3 are lost, so step 2 is the newest complete one."""
    for rank in range(RANKS):
        for path in shards(folder, rank):
            if path.name == "shard-00001.safetensors":
                path.unlink()


def lose_too_much(folder: Path) -> None:
    """Two nodes and the shared checkpoints are lost: what the third node has is not complete."""
    lose_two(folder)
    shutil.rmtree(folder / "shared")


def damage_all(folder: Path) -> None:
    """Both copies of the same shard are damaged in every step, and there is no shared checkpoint."""
    shutil.rmtree(folder / "shared")
    for rank in range(RANKS):
        for step in (2, 3):
            for path in shards(folder, rank, step):
                if path.name == "shard-00002.safetensors":
                    data = bytearray(path.read_bytes())
                    data[-1] ^= 1
                    path.write_bytes(data)


ALL = (nothing, lose_one, lose_two, damage, lose_a_shard, lose_too_much, damage_all)
SCENARIOS = {f.__name__: f for f in ALL}


def fork_ranks(folder: Path, attempt: Callable[[Path, int], None]) -> None:
    children = []
    for rank in range(RANKS):
        if not (child := os.fork()):
            try:
                store = dist.FileStore(str(folder / f"{attempt.__name__}.store"), RANKS)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
                attempt(folder, rank)
            except BaseException:
                print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    first = Path(sys.argv[1]) / "first"
    first.mkdir()
    fork_ranks(first, first_attempt)
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        shutil.copytree(first, folder)
        # The fast tier distinguishes runs by the shared folder's path, which the copy has changed.
        for old in folder.glob("node-*/*"):
            old.rename(old.with_name(run_name(str(folder / "shared"))))
        SCENARIOS[name](folder)
        fork_ranks(folder, second_attempt)
