"""The parts that `bench.scale` measures. Each prepares what the ranks would send or write, and returns the work on it.

RANKS_PER_NODE ranks share a node. A rank of the simulated run holds a part of each tensor of a Llama 3 8B.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from data_pipeline.stream.mixture import first_phase
from data_pipeline.stream.order import source_order
from data_pipeline.stream.plan import BatchSizes, Plan, rank_samples
from data_pipeline.stream.saved_state import merge_states
from launch.inspect.run_status import read_status
from launch.supervise.health import judge
from launch.supervise.rank_logs import Failure, root_cause
from launch.supervise.requeue import Attempt, decide, ending
from parallel.environ import expand_nodes
from train.checkpoint.format.manifest import Description, Manifest, Piece, ShardFile, decode, describe, join, shard_name
from train.checkpoint.nodes import Nodes
from train.checkpoint.stores.local import LocalRoot
from train.health.collectives import GroupRecord
from train.health.hang_report import refine
from train.health.heartbeats import Hang
from train.health.replicas import check_replicas
from train.run_folder import RunFolder

Part = Callable[[int, Path], Callable[[], Any]]
"""`part(ranks, folder)` prepares and returns the work that is measured. `folder` is empty, and the same each time."""
RANKS_PER_NODE = 8
TENSORS = [
    f"layers.{layer}.{name}.weight" for layer in range(32) for name in ("q", "k", "v", "o", "up", "gate", "down")
]
ROWS, COLUMNS, HEADER = 32, 4096, 1 << 20
STATES = ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq")
NOW = 1e9


def memory_mib() -> float:
    """Memory of this process in MiB."""
    return psutil.Process().memory_info().rss / 2**20


def _shard(rank: int, ranks: int) -> tuple[ShardFile, int, list[Piece]]:
    """A shard with ROWS rows of each tensor."""
    name, size, checksums = shard_name(rank), ROWS * COLUMNS * 4, ("0" * 16,)
    names = [state.format(tensor) for tensor in TENSORS for state in STATES]
    pieces = [
        Piece(
            one, "F32", (ROWS * ranks, COLUMNS), (ROWS * rank, 0), (ROWS, COLUMNS), name, HEADER + at * size, checksums
        )
        for at, one in enumerate(names)
    ]
    return ShardFile(name, HEADER + len(names) * size, HEADER, "0" * 16), rank, pieces


def _facts(ranks: int) -> Manifest:
    states = [_data_state(rank, ranks) for rank in range(ranks)]
    return Manifest(1000, 10**9, None, {}, {"model": {}}, {"ranks": ranks}, states, {}, "now", [], {})


def _data_state(rank: int, ranks: int) -> dict[str, Any]:
    """What `Stream.state` returns on a rank of a run with four sources."""
    sizes = dict.fromkeys(("rows", "row_tokens", "tokens", "documents"), 10**9)
    sources = [{"path": f"data/{n}", "fingerprint": "0" * 16, "tokenizer": {"name": "bpe"}, **sizes} for n in range(4)]
    counters = [[source, 0, 100, rank] for source in range(4)]
    place = {"version": 1, "rank": rank, "world_size": ranks, "step": 1000, "samples": 1000 * ranks, "seed": 1}
    place |= {"global_batch_size": ranks, "batch_sizes": [[0, ranks]], "seq_len": 8192}
    return place | {"sources": sources, "weights": [[0, [1.0] * 4]], "quarantined": [], "counters": counters}


def describe_shard(ranks: int, _: Path) -> Callable[[], Description]:
    shard = _shard(ranks - 1, ranks)
    return lambda: describe(*shard)


def join_manifest(ranks: int, _: Path) -> Callable[[], bytearray]:
    facts, shards = _facts(ranks), [describe(*_shard(rank, ranks)) for rank in range(ranks)]
    return lambda: join(facts, shards)


def read_manifest(ranks: int, folder: Path) -> Callable[[], Manifest]:
    data = bytes(join_manifest(ranks, folder)())
    return lambda: decode(data)


def merge_data_states(ranks: int, _: Path) -> Callable[[], object]:
    states = [_data_state(rank, ranks) for rank in range(ranks)]
    return lambda: merge_states(states)


def compare_replicas(ranks: int, _: Path) -> Callable[[], None]:
    hashes = [{"": 1, f"shard={rank % RANKS_PER_NODE}": rank % RANKS_PER_NODE} for rank in range(ranks)]
    return lambda: check_replicas(hashes)


def place_on_nodes(ranks: int, folder: Path) -> Callable[[], object]:
    class Group:
        rank = 0

        def gather_all(self, value: Any) -> list[Any]:
            found = [(f"node{rank // RANKS_PER_NODE}", "boot", 1, 1) for rank in range(ranks)]
            return [value._replace(result=identity) for identity in found]

    def work() -> list[int | None]:
        nodes = Nodes(folder / "tier", Group())  # pyright: ignore[reportArgumentType]
        return [nodes.receiver(rank) for rank in range(ranks)]

    return work


def retain(ranks: int, folder: Path) -> Callable[[], None]:
    root = LocalRoot(folder / "checkpoints")
    for step in (1, 2):
        path = root.folder(step).path
        path.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            (path / shard_name(rank)).touch()
        (path / "manifest.json").touch()

    def work() -> None:
        root.remove(root.steps()[0])
        root.sweep()

    return work


def _run_folder(ranks: int, folder: Path) -> RunFolder:
    """A run whose ranks have all failed in the same second."""
    run = RunFolder(folder / "run")
    for node in range(ranks // RANKS_PER_NODE):
        logs = run.logs / f"node{node}"
        logs.mkdir(parents=True, exist_ok=True)
        lines = ["RuntimeError: Connection closed by peer"] * 30
        Failure(NOW, 8 * node, f"node{node}", "exit code 1", (False, node != 1, True), "", lines).save(logs)
    events = [{"time": NOW - 100, "kind": "started", "attempt": 1}]
    events += [{"time": NOW, "kind": "failed", "rank": r, "exit_code": 1, "error": "CUDA error"} for r in range(ranks)]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    run.metrics.write_text(json.dumps({"time": NOW, "step": 7, "loss": 2.0}) + "\n")
    beat = {"rank": 0, "host": "node0", "pid": 1, "phase": "forward", "step": 7, "where": "torch.x:1 f"}
    run.status.write_text(json.dumps({"time": NOW, "ranks": [beat | {"rank": rank} for rank in range(ranks)]}))
    return run


def show_status(ranks: int, folder: Path) -> Callable[[], object]:
    run = _run_folder(ranks, folder)
    return lambda: read_status(run.root, NOW, 10)


def find_root_cause(ranks: int, folder: Path) -> Callable[[], object]:
    run = _run_folder(ranks, folder)
    return lambda: root_cause(run.logs, NOW - 100)


def decide_requeue(ranks: int, folder: Path) -> Callable[[], object]:
    run = _run_folder(ranks, folder)

    def work() -> tuple[bool, str]:
        code, why = ending(run.root, NOW - 100, 1)
        return decide(Attempt(code, why, 0, 3, progress=True))

    return work


def judge_nodes(ranks: int, _: Path) -> Callable[[], object]:
    nodes = expand_nodes(f"n[1-{ranks // RANKS_PER_NODE}]")
    lines = [f"healthy {node}" for node in nodes[1:]] + [f"unhealthy {nodes[0]}: GPU 3 has 2 uncorrected ECC errors"]
    return lambda: judge(lines, expand_nodes(f"n[1-{len(nodes)}]"))


def report_hang(ranks: int, _: Path) -> Callable[[], Hang]:
    def groups(rank: int) -> Sequence[GroupRecord]:
        late, node = rank == ranks // 2, rank // RANKS_PER_NODE
        names = ["0", f"node{node}", f"across{rank % RANKS_PER_NODE}", "checkpoints"]
        waits = GroupRecord("0/nccl", "default_pg", 90 - late, "" if late else "nccl:all_reduce of [[4]]")
        return [waits, *(GroupRecord(f"{name}/gloo", name, 40) for name in names)]

    told = {rank: json.dumps([asdict(group) for group in groups(rank)]) for rank in range(ranks)}
    return lambda: refine(Hang(None, "all wait"), {rank: json.loads(text) for rank, text in told.items()})


def plan_data(ranks: int, _: Path) -> Callable[[], object]:
    order = source_order(10**9, 64)
    sizes = BatchSizes(((0, 4 * ranks),))
    rank, step = random.Random(1).randrange(ranks), 100_000

    def work() -> np.ndarray:
        plan = Plan(1, (order,) * 4, (1,) * 4, sizes, (first_phase([1.0, 2.0, 3.0, 4.0]),))
        return plan.locate(rank_samples(sizes.first_sample(step), 4096, rank, ranks)).row

    return work


PARTS: dict[str, Part] = {
    "manifest: one rank's part": describe_shard,
    "manifest: joined by rank 0": join_manifest,
    "manifest: read by each rank": read_manifest,
    "data states merged on a resume": merge_data_states,
    "replicas compared": compare_replicas,
    "fast tier: nodes and their peers": place_on_nodes,
    "retention: one checkpoint removed": retain,
    "`keepstep status`": show_status,
    "root cause from the logs": find_root_cause,
    "requeue decision": decide_requeue,
    "health check judged": judge_nodes,
    "hang: the late rank found": report_hang,
    "data plan: one rank's next 4,096 samples": plan_data,
}
