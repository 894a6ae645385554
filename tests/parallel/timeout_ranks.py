"""A program for ranks: the time limits of their process groups."""

import os
from typing import Any

import torch
from torch.distributed import distributed_c10d

from parallel.bootstrap import start
from parallel.build_engine import build_engine
from parallel.environ import read_world
from tests.parallel.engine_trial import config_of, trainable


def timeouts(settings: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds that collectives of each group of this rank may take, by the group's description. Collective."""
    algorithm = settings.pop("algorithm", "adamw")
    config = config_of(**settings)
    runtime = start(config, read_world(os.environ))
    build_engine(config, runtime, trainable(algorithm=algorithm)).close()
    found: dict[str, list[float]] = {}
    for group in distributed_c10d._world.pg_map:
        backend = group._get_backend(torch.device("cpu"))
        found.setdefault(group.group_desc, []).append(backend.options._timeout.total_seconds())
    return found
