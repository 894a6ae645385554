"""A long run takes no more memory than a short one."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline.stream.batch import Batch
from parallel.bootstrap import start
from parallel.build_engine import build_engine
from parallel.config import ParallelConfig
from parallel.engine import Trainable
from parallel.environ import read_world
from train.device_batch import loss_by_source, to_device
from train.model.config import ModelConfig
from train.model.gpt import GPT, initial_value
from train.optim.config import OptimConfig
from train.optim.groups import build_optimizer

MODEL = ModelConfig(vocab_size=512, seq_len=256, n_layers=2, n_heads=2, d_model=64)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def packed_batch(generator: np.random.Generator) -> Batch:
    """Two rows, whose documents end elsewhere in each batch."""
    tokens_BT = generator.integers(512, size=(2, 256))
    documents_BT = np.sort(generator.integers(4, size=(2, 256)), axis=1).astype(np.int32)
    places_BT = np.tile(np.arange(256), (2, 1))
    return Batch(tokens_BT, tokens_BT, places_BT, documents_BT, np.zeros(2, np.int32), np.arange(2))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_memory_is_flat_over_2000_steps() -> None:
    config = ParallelConfig(engine="single", precision="bf16", device="cpu")
    runtime = start(config, read_world({}))
    trainable = Trainable(
        build=lambda: GPT(MODEL),
        initial_value=lambda name, pairs: initial_value(name, pairs, MODEL, seed=1),
        optimizer=lambda model: build_optimizer(model, OptimConfig(lr=1e-3)),
    )
    engine, loss_fn = build_engine(config, runtime, trainable), loss_by_source(1)
    generator = np.random.default_rng(1)
    resident: list[float] = []
    for step in range(2000):
        engine.forward_backward([to_device(packed_batch(generator), torch.device("cpu"))], loss_fn, 1 / 512)
        engine.step(1e-3, 1.0)
        if step % 100 == 99:
            resident.append(resident_mib())
    assert max(resident[5:]) < resident[4] + 16, f"MiB after every 100 steps: {[round(mib) for mib in resident]}"
