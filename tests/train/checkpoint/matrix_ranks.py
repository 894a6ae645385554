"""Run by test_matrix.py: every layout saves, and every layout loads every checkpoint, on real gloo ranks.

    python matrix_ranks.py FOLDER LAYOUT...

One process imports everything and forks the ranks of one layout after another, so that it imports only once. First
each layout trains 2 steps, saves, and trains 2 more (the uninterrupted run). Then each layout loads each of those
checkpoints, saves it again immediately, and trains the same 2 steps. FOLDER/results.jsonl has the losses.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.bootstrap import Runtime, start
from parallel.build_engine import build_engine
from parallel.config import ParallelConfig
from parallel.engine import BatchLoss, Engine, Trainable
from parallel.environ import World
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.config import CheckpointConfig
from train.model.config import ModelConfig
from train.model.gpt import GPT, initial_value
from train.optim.config import OptimConfig
from train.optim.groups import build_optimizer

LAYOUTS = {
    "single": (1, {"engine": "single"}),
    "ddp-2": (2, {"engine": "ddp"}),
    "fsdp-2": (2, {"engine": "fsdp2"}),
    "fsdp-4": (4, {"engine": "fsdp2"}),
    "hsdp-2x2": (4, {"engine": "fsdp2", "replicate": 2, "shard": 2}),
    "fsdp-2-tp-2": (4, {"engine": "fsdp2", "shard": 2, "tensor": 2}),
    "zero1-2": (2, {"engine": "zero1"}),
    "zero2-3": (3, {"engine": "zero2"}),
    "zero3-4": (4, {"engine": "zero3"}),
}
MODEL = ModelConfig(vocab_size=66, seq_len=16, n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, d_ff=46)
"""Vocabulary and feed-forward width are not multiples of 4, so some shards are shorter than others."""
GLOBAL_BATCH = 12
SAVE_AT, LAST = 2, 4


def batch(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    rows_BT = torch.randint(MODEL.vocab_size, (GLOBAL_BATCH, MODEL.seq_len + 1), generator=generator)[rank::ranks]
    return rows_BT[:, :-1], rows_BT[:, 1:]


def loss_fn(model: nn.Module, rows: tuple[Tensor, Tensor]) -> BatchLoss:
    tokens_BT, labels_BT = rows
    positions_BT = torch.arange(MODEL.seq_len).expand_as(tokens_BT)
    loss = model(tokens_BT, positions_BT, torch.zeros_like(tokens_BT), labels_BT).sum()
    return BatchLoss(objective=loss, sums=loss.reshape(1))


def train(engine: Engine, runtime: Runtime, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        rows = batch(step, runtime.data_parallel_rank, runtime.data_parallel_size)
        scale = runtime.data_parallel_size / (GLOBAL_BATCH * MODEL.seq_len)
        loss = engine.forward_backward([rows], loss_fn, scale).sum() / (GLOBAL_BATCH * MODEL.seq_len)
        if runtime.data_parallel_group is not None:
            dist.all_reduce(loss, group=runtime.data_parallel_group)
        engine.step(1e-3, 1.0)
        losses.append(loss.item())
    return losses


def manager_for(folder: Path, layout: str) -> CheckpointManager:
    return CheckpointManager(
        folder, CheckpointConfig(), {"model": MODEL.model_dump()}, _record, layout={"name": layout}
    )


def _record(kind: str, **details: object) -> None:
    if kind == "save_failed":
        raise AssertionError(details)


def save(folder: Path, layout: str, engine: Engine, runtime: Runtime) -> None:
    losses = train(engine, runtime, 0, SAVE_AT)
    manager = manager_for(folder / layout, layout)
    manager.save(SavedProgress(SAVE_AT, 0), engine.state(), {"rank": runtime.world.rank})
    losses += train(engine, runtime, SAVE_AT, LAST)  # while the save is written
    manager.close()
    report(folder, runtime, kind="uninterrupted", layout=layout, losses=losses)


def load_each(folder: Path, layout: str, sources: list[str], engine: Engine, runtime: Runtime) -> None:
    for source in sources:
        manager = manager_for(folder / source, layout)
        loaded = manager.load_newest(engine.state())
        assert loaded is not None
        engine.refresh_working_weights()
        assert [state["rank"] for state in loaded.rank_states] == list(range(LAYOUTS[source][0]))
        manager.close()
        again = manager_for(folder / f"{source}-by-{layout}", layout)
        again.save(loaded.progress, engine.state(), {})
        again.close()
        losses = train(engine, runtime, loaded.progress.step, LAST)
        read = sum_over_ranks(loaded.bytes_read)
        report(folder, runtime, kind="resumed", source=source, layout=layout, losses=losses, bytes_read=read)


def sum_over_ranks(value: int) -> int:
    if not dist.is_initialized():
        return value
    total = torch.tensor(value)
    dist.all_reduce(total)
    return int(total)


def report(folder: Path, runtime: Runtime, **fields: object) -> None:
    if runtime.world.rank == 0:
        with (folder / "results.jsonl").open("a") as file:
            print(json.dumps(fields), file=file)


def run_rank(rank: int, port: int, folder: Path, layout: str, sources: list[str]) -> None:
    size, fields = LAYOUTS[layout]
    config = ParallelConfig(precision="fp32", device="cpu", timeout_seconds=600, **fields)
    launcher = "single" if size == 1 else "torchrun"
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}  # DeepSpeed reads these
    runtime = start(config, World(rank, size, rank, size, "127.0.0.1", port, launcher))
    optim = OptimConfig(lr=1e-3, ema_decay=0.9)
    trainable = Trainable(
        build=lambda: GPT(MODEL),
        initial_value=lambda name, pairs: initial_value(name, pairs, MODEL, seed=8 if sources else 7),
        optimizer=lambda model: build_optimizer(model, optim),
    )
    engine = build_engine(config, runtime, trainable)
    if sources:
        load_each(folder, layout, sources, engine, runtime)
    else:
        save(folder, layout, engine, runtime)
    engine.close()


def fork_ranks(folder: Path, layout: str, sources: list[str]) -> None:
    size = LAYOUTS[layout][0]
    port = free_port()
    children = []
    for rank in range(size):
        if not (child := os.fork()):
            try:
                run_rank(rank, port, folder, layout, sources)
            except BaseException:
                print(f"rank {rank} of {layout}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"{layout}: exit codes {codes}")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, layouts = Path(sys.argv[1]), sys.argv[2:]
    if any(layout.startswith("zero") for layout in layouts):
        import deepspeed  # noqa: F401 (once, before the forks)
    for layout in layouts:
        fork_ranks(folder, layout, [])
    for layout in layouts:
        fork_ranks(folder, layout, layouts)
