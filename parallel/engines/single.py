"""One process that holds everything and sends nothing.

Memory per parameter: 4 bytes of weight, 4 of gradient, and the optimizer state (8 with AdamW). Under bf16 and fp16 the
working copy takes 2 more.
"""

from contextlib import nullcontext

from torch import nn

from parallel.bootstrap import Runtime
from parallel.config import ParallelConfig
from parallel.engine import Trainable
from parallel.engines.blocks import apply_to_blocks
from parallel.engines.graphs import MicroBatchGraph, flat_gradients, record_on_cuda
from parallel.engines.precision import DTYPES, LossScaler
from parallel.engines.torch_engine import TorchEngine, build_without_values


def build_single(config: ParallelConfig, runtime: Runtime, trainable: Trainable) -> TorchEngine:
    """The engine `single`, with weights that are not set yet."""
    model = build_without_values(trainable.build, runtime.device)
    apply_to_blocks(model, config)
    return wrap_whole_model(model, config, runtime, trainable)


def wrap_whole_model(model: nn.Module, config: ParallelConfig, runtime: Runtime, trainable: Trainable) -> TorchEngine:
    """The engine around a whole model that has memory."""
    return TorchEngine(
        model,
        trainable.optimizer(model),
        device=runtime.device,
        working_dtype=DTYPES[config.precision],
        scaler=LossScaler() if config.precision == "fp16" else None,
        exchange=lambda _is_last: nullcontext(),
        graph=MicroBatchGraph(flat_gradients(model), record_on_cuda) if config.cuda_graphs else None,
        keep_gradients=config.cuda_graphs,
    )
