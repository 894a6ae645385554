"""A program for ranks: one step of Muon on the same weights and gradients in several layouts."""

from typing import Any

import torch
from torch import Tensor

from parallel.build_engine import build_engine
from parallel.engine import Trainable
from parallel.engines.initial import fill_parts, held_part
from tests.parallel.engine_trial import config_of, runtime_of, trainable, whole
from train.optim import muon
from train.optim.dealt import work_of

MODEL: dict[str, Any] = {"d_model": 40, "n_heads": 2, "n_kv_heads": 2, "d_ff": 104, "tied_embeddings": False}


def step_each(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The gathered weights after two steps and this rank's share of the work, by case. Collective."""
    return {name: step(settings) for name, settings in cases.items()}


def step(settings: dict[str, Any]) -> dict[str, Any]:
    """Weights after two steps with given gradients, and the work that this rank did. Collective."""
    made: Trainable = trainable(algorithm="muon", **MODEL)
    config = config_of(**settings)
    runtime = runtime_of(config)
    engine: Any = build_engine(config, runtime, made)
    done: list[int] = []
    true = muon.update_of

    def counted(momentum: Tensor) -> Tensor:
        done.append(work_of(momentum.shape))
        return true(momentum)

    muon.update_of = counted
    for seed in range(2):
        for name, parameter in engine.model.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
            part = held_part(name, parameter.grad)
            fill_parts([part], lambda name, pairs, seed=seed: made.initial_value(name, pairs + (seed + 1) * 10**9))
        engine.optimizer.step()
    muon.update_of = true
    weights = {name: whole(value) for name, value in engine.state().items() if name.startswith("model.layers.")}
    return {"weights": weights, "work": sum(done), "largest": max(done, default=0)}
