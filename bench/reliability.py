"""What reliability costs: seconds from a kill to the next step, and the share of a step that watching takes.

    python bench/reliability.py recovery --data DATA --out OUT [--ranks 2] [RECIPE] [OVERRIDES ...]
    python bench/reliability.py watching [RECIPE] [OVERRIDES ...]

`recovery` trains three times: plainly, from the command to the end of the first step; the same command again over the
checkpoint; and with a rank killed on the way, from the kill to the end of the next step.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from launch.trial import Trial
from train.config_file import load_recipe
from train.events import read_jsonl

STEPS = 40
KILLED_AFTER = 25


def main() -> None:
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
        watching(options.recipe, options.overrides)


def recovery(recipe: str, overrides: list[str], data: Path, out: Path, ranks: int) -> None:
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
    fault = {"fault": "kill", "rank": ranks - 1, "step": KILLED_AFTER, "phase": "forward"}
    killed.train([fault], max_restarts=1)
    moment = (killed.marks / "0").stat().st_mtime
    print(f"after a kill: {_first_step(killed, moment) - moment:.2f} s from the kill to the end of the next step")


def _first_step(trial: Trial, after: float) -> float:
    records = read_jsonl(trial.folder / "metrics.jsonl")
    return next(record["time"] for record in records if "loss" in record and record["time"] > after)


def watching(path: str, overrides: list[str]) -> None:
    """One rank's costs, against a step of the model on this machine without any communication."""
    import torch

    from parallel.bootstrap import start
    from parallel.engine import Trainable, build_engine
    from parallel.environ import read_world
    from train.clock import Clock
    from train.corruption import hashes
    from train.faults import Faults
    from train.guard import Guard
    from train.model import GPT, initial_value
    from train.optim import build_optimizer
    from train.watchdog import Probe, Watchdog

    recipe = load_recipe(path, [*overrides, "parallel.engine=single"])
    runtime = start(recipe.parallel, read_world({}))
    trainable = Trainable(
        build=partial(GPT, recipe.model),
        initial_value=partial(initial_value, config=recipe.model, seed=1),
        optimizer=partial(build_optimizer, config=recipe.optim),
    )
    engine = build_engine(recipe.parallel, runtime, trainable)
    micro, seq_len = recipe.train.micro_batch_size, recipe.model.seq_len
    tokens = torch.randint(recipe.model.vocab_size, (micro, seq_len), device=runtime.device)
    positions = torch.arange(seq_len, device=runtime.device).expand(micro, -1)
    documents = torch.zeros_like(tokens, dtype=torch.int32)
    batches = [tokens] * recipe.grad_accum_steps(1)

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch, positions, documents, batch).sum().reshape(1)

    def step() -> None:
        engine.forward_backward(batches, loss_fn, 1.0 / tokens.numel())
        engine.step(1e-4, 1.0)

    out = Path(tempfile.mkdtemp())
    watchdog = Watchdog(out / "status.json", out, rank=0, world_size=1, hang_seconds=480, record=lambda *_, **__: None)
    clock, faults, guard, probe = Clock(), Faults({}, 0, Path()), Guard(recipe.guard), Probe(runtime.device)
    for number in range(recipe.guard.window):
        guard.judge(number, 3.0 + 0.01 * (number % 7), 1.0)

    def enter() -> None:
        clock.enter("forward")
        watchdog.beat("forward", 1)
        faults.strike("forward", 1)

    def judge() -> None:
        guard.norm_limit(3.0)
        guard.judge(1, 3.0, 1.0)

    whole = seconds(step, 5)
    costs = {
        "clock, heartbeat and faults, 4 phases": 4 * seconds(enter, 1000),
        "guard": seconds(judge, 1000),
        f"hash of all copies, every {recipe.guard.compare_replicas_every} steps": seconds(
            lambda: hashes(engine.copies()), 5
        )
        / max(1, recipe.guard.compare_replicas_every),
        f"probe of speed, every {recipe.train.log_every} steps": seconds(probe.seconds, 20) / recipe.train.log_every,
    }
    watchdog.close()
    print(f"a step of {recipe.name} takes {1e3 * whole:.1f} ms; of that")
    for name, cost in costs.items():
        print(f"  {name:45} {1e6 * cost:9.1f} us a step  {cost / whole:8.4%}")
    print(f"  {'together':45} {1e6 * sum(costs.values()):9.1f} us a step  {sum(costs.values()) / whole:8.4%}")


def seconds(action: Callable[[], object], times: int) -> float:
    """The median of several calls, after one to warm up."""
    action()
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return median(taken)


if __name__ == "__main__":
    main()
