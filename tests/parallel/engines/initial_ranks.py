"""A program for ranks: the initial weights of engines, gathered."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.analysis.fake_world import fake_group
from parallel.build_engine import build_engine
from parallel.collectives import gather_objects
from parallel.engines.fsdp2 import materialise, shard_model
from parallel.engines.initial import fill_model
from parallel.sharded import local_part
from tests.parallel.engine_trial import config_of, fake_runtime, runtime_of, trainable, whole

MODEL: dict[str, Any] = {"d_model": 40, "n_heads": 2, "n_kv_heads": 2, "tied_embeddings": False}


def initial_weights(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The whole weights by case, and the number of elements that each rank drew."""
    return {name: _weights_of(dict(settings)) for name, settings in cases.items()}


def slices_of_fake_rank(rank: int) -> dict[str, Tensor]:
    """What one rank of a fake world of 12 draws under FSDP2. torch caches meshes, so a process can be one rank only."""
    made = trainable(**MODEL)
    with fake_group(12, rank):
        config = config_of(engine="fsdp2")
        mesh = fake_runtime(config, 12).mesh
        assert mesh is not None
        with torch.device("meta"):
            model = made.build()
        shard_model(model, config, mesh)
        materialise(model, torch.device("cpu"))
        fill_model(model, made.initial_value)
        return {name: local_part(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def _weights_of(settings: dict[str, Any]) -> dict[str, Any]:
    made = trainable(**MODEL)
    drawn = 0

    def counted(name: str, pairs: Tensor) -> Tensor:
        nonlocal drawn
        drawn += 2 * pairs.numel()
        return made.initial_value(name, pairs)

    config = config_of(**settings)
    runtime = runtime_of(config)
    engine = build_engine(config, runtime, type(made)(made.build, counted, made.optimizer))
    weights = {name: whole(value) for name, value in engine.state().items() if name.startswith("model.")}
    engine.close()
    return {"weights": weights, "drawn": gather_objects(drawn) if dist.is_initialized() else [drawn]}
