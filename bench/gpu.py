"""Times training steps on one CUDA device, or on several under torchrun, and prints their MFU.

`python -m bench.gpu [--model 124M]`, or `torchrun --nproc-per-node 8 -m bench.gpu --engine fsdp2`. It needs
torch >= 2.11 and no network. MFU is relative to the device's peak in bf16, which a large matrix product measures here.
"""

import argparse
import os
import statistics
import time
from functools import partial

import numpy as np
import torch

from bench.step import MODELS
from data_pipeline.stream.batch import Batch
from parallel.bootstrap import leave, start
from parallel.build_engine import build_engine
from parallel.collectives import gather_objects
from parallel.config import ParallelConfig
from parallel.engine import Engine, Trainable
from parallel.environ import read_world
from train.device_batch import loss_by_source, to_device
from train.model.attention import AttentionChoice, choose_form
from train.model.config import ModelConfig
from train.model.flops import flops_per_token, measure_matmul_peak
from train.model.gpt import GPT, initial_value
from train.optim.config import OptimConfig
from train.optim.groups import build_optimizer

LLAMA_1B = {"vocab_size": 32_000, "seq_len": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "d_model": 2048}
SHAPES: dict[str, dict[str, int]] = {**MODELS, "llama-1b": {**LLAMA_1B, "d_ff": 5632}}


def packed_rows(rows: int, model: ModelConfig, documents: int) -> Batch:
    """A batch of random tokens. Each row holds `documents` documents of random lengths."""
    generator = np.random.default_rng(1)
    shape = (rows, model.seq_len)
    tokens_BT = generator.integers(model.vocab_size, size=shape)
    documents_BT = np.sort(generator.integers(documents, size=shape), axis=1).astype(np.int32)
    firsts_BT = np.stack([np.searchsorted(row, row) for row in documents_BT])
    return Batch(
        tokens_BT=tokens_BT,
        labels_BT=np.roll(tokens_BT, -1, axis=1),
        positions_BT=np.arange(model.seq_len) - firsts_BT,
        documents_BT=documents_BT,
        sources_B=np.zeros(rows, np.int32),
        samples_B=np.arange(rows),
    )


def step_seconds(engine: Engine, batch: Batch, device: torch.device, steps: int) -> list[float]:
    """Seconds of each step. The first includes compilation. Collective."""
    loss_fn, seconds = loss_by_source(1), []
    for _ in range(steps):
        began = time.perf_counter()
        engine.forward_backward([to_device(batch, device)], loss_fn, 1 / batch.tokens_BT.size)
        engine.step(1e-4, 1.0)  # it reads the norm on the host, so the device has finished
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Train as the command line says and print one line on rank 0. Collective."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="124M")
    parser.add_argument("--engine", default="single")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--fp8-scaling", choices=("rowwise", "tensorwise"), default="rowwise")
    parser.add_argument("--attention", default="auto", help="parallel.attention: auto, flex, flash or cudnn")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--documents", type=int, default=4, help="documents per row")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    options = parser.parse_args()
    model = ModelConfig(**SHAPES[options.model])  # pyright: ignore[reportArgumentType]
    config = ParallelConfig(
        engine=options.engine,
        precision=options.precision,
        fp8_scaling=options.fp8_scaling,
        compile=options.compile,
        cuda_graphs=options.cuda_graphs,
        device=options.device,
    )
    runtime = start(config, read_world(os.environ))
    attention = choose_form(options.attention, runtime.device.type, options.precision)
    peak = measure_matmul_peak(runtime.device, torch.bfloat16, seconds=1.0)
    trainable = Trainable(
        build=partial(GPT, model, AttentionChoice(attention)),
        initial_value=partial(initial_value, config=model, seed=1),
        optimizer=partial(build_optimizer, config=OptimConfig(lr=1e-4)),
    )
    engine = build_engine(config, runtime, trainable)
    batch = packed_rows(options.micro_batch_size, model, options.documents)
    first, *warm = step_seconds(engine, batch, runtime.device, options.steps)
    median = statistics.median(warm[len(warm) // 3 :])
    tokens = batch.tokens_BT.size * runtime.data_parallel_size
    flops = flops_per_token(model) * tokens / median
    gather_objects(None)
    if runtime.world.rank == 0:
        name = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else "cpu"
        memory = torch.cuda.max_memory_allocated(runtime.device) / 2**30 if runtime.device.type == "cuda" else 0.0
        mfu = flops / peak / runtime.world.world_size
        precision = options.precision + " with graphs" * options.cuda_graphs
        print(
            f"{options.model} {options.engine} {precision}, attention {attention}, "
            f"on {runtime.world.world_size} x {name}, torch {torch.__version__}: {tokens / median:,.0f} tokens/s, "
            f"{flops / 1e12:.2f} TFLOP/s, MFU {mfu:.1%} "
            f"of a measured {peak / 1e12:.2f} TFLOP/s, {memory:.2f} GiB, first step {first:.1f} s, then "
            f"{min(warm):.4f} to {max(warm):.4f} s"
        )
    leave(0)


if __name__ == "__main__":
    main()
