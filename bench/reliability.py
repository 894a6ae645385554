"""The cost of reliability: seconds from a kill to the next step, and the share of a step that monitoring takes.

    python bench/reliability.py recovery --data DATA --out OUT [--ranks 2] [RECIPE] [OVERRIDES ...]
    python bench/reliability.py watching [--ranks 2] [RECIPE] [OVERRIDES ...]

`recovery` trains twice. Without a fault, it measures from the command to the end of the first step. With a rank that is
killed, it measures from the kill to the end of the next step. `watching` trains on random tokens under DDP, whose ranks
hold replicas of all weights, and measures each part of the monitoring.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from launch.proof.trial import Trial
from train.config_file import load_recipe
from train.records.jsonl import read_jsonl

if TYPE_CHECKING:
    from parallel.bootstrap import Runtime
    from parallel.engine import Engine
    from train.config import Recipe

STEPS = 40
KILL_STEP = 25
"""Optimizer steps finished when the rank is killed."""


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["recovery", "watching"])
    parser.add_argument("recipe", nargs="?", default="recipes/laptop.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_intermixed_args()
    if options.what == "recovery":
        recovery(options.recipe, options.overrides, options.data, options.out, options.ranks)
    else:
        watching(options.recipe, options.overrides, options.ranks)


def recovery(recipe: str, overrides: list[str], data: Path, out: Path, ranks: int) -> None:
    """Print the seconds to the first step of a plain start, and from a kill to the next step."""
    settings = [
        *overrides,
        f"data.sources.0.path={data}",
        f"runs_dir={out / 'runs'}",
        f"train.steps={STEPS}",
        "train.eval_sequences=0",
        "checkpoint.every=10",
    ]
    plain, killed = (Trial(recipe, name, out, settings, ranks) for name in ("plain", "killed"))
    started = time.time()
    plain.train([], 0)
    print(f"plain start: {_first_step(plain, started) - started:.2f} s from the command to the end of the first step")
    fault = {"fault": "kill", "rank": ranks - 1, "step": KILL_STEP, "phase": "forward"}
    killed.train([fault], max_restarts=1)
    moment = (killed.marks / "0").stat().st_mtime
    print(f"after a kill: {_first_step(killed, moment) - moment:.2f} s from the kill to the end of the next step")


def _first_step(trial: Trial, after: float) -> float:
    """Time of the first step that ended after the given time, both in seconds since the epoch."""
    records = read_jsonl(trial.folder / "metrics.jsonl")
    return next(record["time"] for record in records if "loss" in record and record["time"] > after)


def watching(path: str, overrides: list[str], ranks: int) -> None:
    """Start the ranks and print the cost of monitoring on rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=watch, args=(path, overrides, rank, ranks, port)) for rank in range(1, ranks)]
    for process in others:
        process.start()
    watch(path, overrides, 0, ranks, port)
    for process in others:
        process.join()


def watch(path: str, overrides: list[str], rank: int, ranks: int, port: int) -> None:
    """Measure one rank's costs relative to a step; rank 0 prints its own. Collective."""
    from parallel.bootstrap import start
    from parallel.environ import World
    from train.health.guard import Guard
    from train.health.injected_faults import FaultInjector
    from train.health.replicas import compare_replicas
    from train.health.watchdog import Probe, Watchdog
    from train.records.clock import Clock

    recipe = load_recipe(path, [*overrides, "parallel.engine=ddp"])
    runtime = start(recipe.parallel, World(rank, ranks, rank, ranks, "127.0.0.1", port, "env"))
    engine, step = a_step(recipe, runtime)
    out = Path(tempfile.mkdtemp())
    watchdog = Watchdog(
        out / "status.json", out, rank=rank, world_size=ranks, hang_seconds=480, record=lambda *_, **__: None
    )
    clock, faults = Clock(), FaultInjector({}, rank, Path())
    guard, probe = Guard(recipe.guard), Probe(runtime.device)
    for number in range(recipe.guard.window):
        guard.judge(number, 3.0 + 0.01 * (number % 7), 1.0)

    def enter() -> None:
        clock.enter("forward")
        watchdog.enter_phase("forward", 1)
        faults.inject("forward", 1)

    def judge() -> None:
        guard.norm_limit(3.0)
        guard.judge(1, 3.0, 1.0)

    every, log_every = recipe.guard.compare_replicas_every, recipe.train.log_every
    whole = seconds(step, 5)
    compared = seconds(lambda: compare_replicas(engine.replicated_tensors(), runtime.device), 20)
    costs = {
        "clock, heartbeat and faults, 4 phases": 4 * seconds(enter, 1000),
        "guard": seconds(judge, 1000),
        f"hash of all replicas, gathered, every {every} steps": compared / max(1, every),
        f"speed probe, every {log_every} steps": seconds(probe.seconds, 20) / log_every,
        "heartbeats sent and checked, every 2 s": seconds(lambda: watchdog._round(2.0), 20) * whole / 2.0,
    }
    watchdog.close()
    if rank == 0:
        print(f"a step of {recipe.name} on {ranks} ranks takes {1e3 * whole:.1f} ms, of which")
        for name, cost in [*costs.items(), ("all together", sum(costs.values()))]:
            print(f"  {name:50} {1e6 * cost:9.1f} us a step  {cost / whole:8.4%}")


def a_step(recipe: Recipe, runtime: Runtime) -> tuple[Engine, Callable[[], None]]:
    """The recipe's engine, and a function that trains it by one step on random tokens."""
    import torch

    from parallel.build_engine import build_engine
    from parallel.engine import BatchLoss, Trainable
    from train.model.gpt import GPT, initial_value
    from train.optim.groups import build_optimizer

    trainable = Trainable(
        build=partial(GPT, recipe.model),
        initial_value=partial(initial_value, config=recipe.model, seed=1),
        optimizer=partial(build_optimizer, config=recipe.optim),
    )
    engine = build_engine(recipe.parallel, runtime, trainable)
    shape = recipe.train.micro_batch_size, recipe.model.seq_len
    tokens = torch.randint(recipe.model.vocab_size, shape, device=runtime.device)
    positions = torch.arange(shape[1], device=runtime.device).expand(shape)
    documents = torch.zeros_like(tokens, dtype=torch.int32)
    batches = [tokens] * recipe.grad_accum_steps(runtime.data_parallel_size)

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> BatchLoss:
        loss = model(batch, positions, documents, batch).sum()
        return BatchLoss(objective=loss, sums=loss.reshape(1))

    def step() -> None:
        engine.forward_backward(batches, loss_fn, 1.0 / tokens.numel())
        engine.step(1e-4, 1.0)

    return engine, step


def seconds(action: Callable[[], object], times: int) -> float:
    """Median seconds of several calls, after one warm-up call."""
    action()
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return median(taken)


if __name__ == "__main__":
    main()
