"""A program for ranks: what four of them find when they compare replicas."""

import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel.analysis.traffic import TrafficCounter
from parallel.bootstrap import start
from parallel.environ import read_world
from tests.parallel.engine_trial import config_of
from train.health.replicas import CorruptionError, compare_replicas


def compare(_: None) -> dict[str, Any]:
    """The error of each case, and the number of gathers. Collective."""
    runtime = start(config_of(engine="fsdp2", replicate=2), read_world(os.environ))
    rank, mesh = runtime.world.rank, runtime.mesh
    assert mesh is not None
    plane = mesh["replicate", "shard"]

    def sharded(value: float, mesh: DeviceMesh, *placements: Any) -> Tensor:
        return DTensor.from_local(torch.full((2, 3), value), mesh, placements, run_check=False)

    parts = sharded(float(rank % 2), plane, Replicate(), Shard(0))
    other_parts = sharded([0.0, 1.0, 0.0, 3.0][rank], plane, Replicate(), Shard(0))
    cases = {
        "equal": {"a": torch.ones(5), "b": parts},
        "whole": {"a": torch.full((5,), 1.0 + (rank == 2)), "b": parts},
        "part": {"a": torch.ones(5), "b": other_parts},
        "no replicas": {"a": sharded(float(rank), plane, Shard(0), Shard(1))},
    }
    found: dict[str, Any] = {}
    with TrafficCounter() as traffic:
        for name, tensors in cases.items():
            try:
                compare_replicas(tensors, runtime.device)
                found[name] = ""
            except CorruptionError as error:
                found[name] = str(error)
    return {**found, "gathers": traffic.calls["all_gather"]}
