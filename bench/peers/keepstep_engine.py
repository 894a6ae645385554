"""Keepstep: the calls of its training loop in one step, on rows of one document."""

import os
from functools import partial

import numpy as np
import torch
from keepstep_model import model_config
from protocol import Spec, read_spec, serve

from data_pipeline.stream.batch import Batch
from parallel.bootstrap import start
from parallel.build_engine import build_engine
from parallel.config import ParallelConfig
from parallel.engine import Trainable
from parallel.environ import read_world
from train.device_batch import loss_by_source, to_device
from train.model.gpt import GPT, initial_value
from train.optim.config import OptimConfig
from train.optim.groups import build_optimizer


def make_batch(spec: Spec, generator: np.random.Generator) -> Batch:
    """A micro batch of random tokens."""
    B, T = spec.micro_batch_size, spec.seq_len
    tokens_BT = generator.integers(spec.vocab_size, size=(B, T + 1))
    return Batch(
        tokens_BT=tokens_BT[:, :-1],
        labels_BT=tokens_BT[:, 1:],
        positions_BT=np.tile(np.arange(T), (B, 1)),
        documents_BT=np.zeros((B, T), np.int32),
        sources_B=np.zeros(B, np.int32),
        samples_B=np.arange(B),
    )


def main() -> None:
    """Serve steps of Keepstep's engine. Collective."""
    spec = read_spec()
    torch.set_num_threads(spec.threads)
    model = model_config(spec)
    config = ParallelConfig.model_validate({"compile": spec.compile, "device": "cpu", **spec.options})
    runtime = start(config, read_world(os.environ))
    trainable = Trainable(
        build=partial(GPT, model),
        initial_value=partial(initial_value, config=model, seed=1),
        optimizer=partial(build_optimizer, config=OptimConfig(lr=1e-3)),
    )
    engine, loss_fn, generator = build_engine(config, runtime, trainable), loss_by_source(1), np.random.default_rng(1)
    scale = 1 / (spec.micro_batch_size * spec.seq_len)

    def step() -> None:
        batch = to_device(make_batch(spec, generator), runtime.device)
        engine.forward_backward([batch], loss_fn, scale)
        engine.step(1e-3, 1.0)

    serve(spec, step)


if __name__ == "__main__":
    main()
