"""A program for ranks: the small collectives of a step of the loop, beside those with which engines move tensors."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallel import collectives
from tests.parallel.engine_trial import config_of, runtime_of
from train import loop
from train.config import Recipe
from train.health.stop import StopRequest
from train.start import open_run

MODEL = {"vocab_size": 512, "seq_len": 32, "n_layers": 2, "n_heads": 2, "d_model": 32}


class CountedCalls:
    """`torch.distributed`, with the calls of its functions counted by name."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        true = getattr(dist, name)
        if not name.startswith(("all_", "broadcast", "gather", "reduce", "scatter", "barrier")):
            return true

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return true(*arguments, **options)

        return counted


def collectives_of_a_step(argument: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Calls through `parallel.collectives` in a step, by engine and function. Collective.

    It is the difference between a run of 8 steps and one of 3, so what happens once a run does not count."""
    found: dict[str, dict[str, float]] = {}
    runtime_of(config_of(engine="ddp"))
    for engine in argument["engines"]:
        short, long = (_count(argument, engine, steps) for steps in (3, 8))
        found[engine] = {name: (long[name] - short[name]) / 5 for name in long if long[name] != short[name]}
    return found


def _count(argument: dict[str, Any], engine: str, steps: int) -> Counter[str]:
    recipe = Recipe.model_validate(
        {
            "name": f"{engine}-{steps}",
            "runs_dir": argument["runs"],
            "model": MODEL,
            "data": {"sources": [{"path": argument["data"]}]},
            "optim": {"lr": 1e-3, "warmup_steps": 1},
            "train": {"steps": steps, "global_batch_size": 4, "micro_batch_size": 1, "eval_every": 0},
            "parallel": {"engine": engine, "device": "cpu", "precision": "fp32"},
            "checkpoint": {"every": 1000, "background": False},
            "guard": {"compare_replicas_every": 0},
        }
    )
    if dist.get_rank() == 0:
        Path(argument["runs"], recipe.name).mkdir()
    counted = CountedCalls()
    collectives.dist = counted  # pyright: ignore
    try:
        with open_run(recipe, runtime_of(recipe.parallel), StopRequest()) as run:
            loop.train(run)
    finally:
        collectives.dist = dist
    return counted.calls
