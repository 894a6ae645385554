"""Data parallel: every rank holds the whole model and sees different data; gradients are averaged once a step.

Traffic: one all-reduce of the fp32 gradients (4 bytes per parameter) in the backward pass of the last micro batch. It
runs in buckets, beside the rest of the backward pass. Earlier micro batches only accumulate gradients.

Memory per parameter and rank: 4 bytes of weight, 4 of gradient (a view of its bucket), and the optimizer state (8 with
AdamW). Under bf16 and fp16 the working copy takes 2 more.

With `cuda_graphs` the passes are replayed as a graph, and the all-reduce follows the last of them (`graphs.py`).

With tensor parallelism the parameters are DTensors, which torch's DistributedDataParallel does not support. Then FSDP2
with a shard axis of one rank does the same: it cuts nothing and averages gradients over the `replicate` axis.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallel.bootstrap import Runtime
from parallel.config import ParallelConfig
from parallel.engine import Trainable
from parallel.engines.blocks import apply_to_blocks
from parallel.engines.fsdp2 import build_fsdp2
from parallel.engines.graphs import MicroBatchGraph, averaged, flat_gradients, record_on_cuda
from parallel.engines.precision import DTYPES, LossScaler
from parallel.engines.torch_engine import TorchEngine, build_without_values


def build_ddp(config: ParallelConfig, runtime: Runtime, trainable: Trainable) -> TorchEngine:
    """The engine `ddp`, with weights that are not set yet. Collective."""
    if runtime.layout.tensor > 1:
        return build_fsdp2(config, runtime, trainable)
    model = build_without_values(trainable.build, runtime.device)
    apply_to_blocks(model, config)
    if config.cuda_graphs:
        return _with_graph(model, config, runtime, trainable)
    wrapped = DistributedDataParallel(
        model,
        process_group=runtime.data_parallel_group,
        gradient_as_bucket_view=True,
        init_sync=False,  # initial values have the same bits on every rank
    )

    def exchange(is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else wrapped.no_sync()

    return TorchEngine(
        model,
        trainable.optimizer(model),
        device=runtime.device,
        called=wrapped,
        working_dtype=DTYPES[config.precision],
        scaler=LossScaler() if config.precision == "fp16" else None,
        exchange=exchange,
        keep_gradients=True,
    )


def _with_graph(model: nn.Module, config: ParallelConfig, runtime: Runtime, trainable: Trainable) -> TorchEngine:
    """The engine without torch's DDP, whose exchange cannot be replayed."""
    gradients = flat_gradients(model)
    return TorchEngine(
        model,
        trainable.optimizer(model),
        device=runtime.device,
        working_dtype=DTYPES[config.precision],
        scaler=LossScaler() if config.precision == "fp16" else None,
        exchange=partial(averaged, gradients, runtime.data_parallel_group),
        graph=MicroBatchGraph(gradients, record_on_cuda),
        keep_gradients=True,
    )
