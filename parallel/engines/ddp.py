"""Data parallel: every rank holds the whole model and sees different data; gradients are averaged once a step.

Moves: one all-reduce of the fp32 gradients (4 bytes per parameter) in the last micro batch's backward pass, in buckets,
while the rest of it still runs. Earlier micro batches accumulate in silence.

Memory per parameter and rank: 4 bytes of weight, 4 of gradient (a view of the bucket it travels in), 8 of moments;
under bf16 and fp16 2 more for the working copy.

With tensor parallelism the parameters are DTensors, which torch's DistributedDataParallel does not take. There the
same is done by FSDP2 with a shard axis of one rank: nothing is cut, gradients are averaged over the `replicate` axis.
"""

from contextlib import AbstractContextManager, nullcontext

from torch.nn.parallel import DistributedDataParallel

from parallel.bootstrap import Runtime
from parallel.config import ParallelConfig
from parallel.engine import Trainable
from parallel.engines.blocks import apply_to_blocks
from parallel.engines.fsdp2 import build_fsdp2
from parallel.engines.precision import DTYPES, LossScaler
from parallel.engines.torch_engine import TorchEngine, build_without_values, fill


def build_ddp(config: ParallelConfig, runtime: Runtime, trainable: Trainable) -> TorchEngine:
    """Collective."""
    if runtime.layout.tensor > 1:
        return build_fsdp2(config, runtime, trainable)
    model = build_without_values(trainable.build, runtime.device)
    fill(model, trainable.initial_value)
    apply_to_blocks(model, config)
    wrapped = DistributedDataParallel(
        model,
        process_group=runtime.data_parallel_group,
        gradient_as_bucket_view=True,
        init_sync=False,  # `fill` gave every rank the same bits
    )

    def exchange(last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else wrapped.no_sync()

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
