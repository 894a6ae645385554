"""One process: everything is here and nothing moves.

Memory per parameter: 4 bytes of weight, 4 of gradient, 8 of moments; under bf16 and fp16 2 more for the working copy.
"""

from contextlib import nullcontext

from torch import nn

from parallel.bootstrap import Runtime
from parallel.config import ParallelConfig
from parallel.engine import Trainable
from parallel.engines.blocks import apply_to_blocks
from parallel.engines.precision import DTYPES, LossScaler
from parallel.engines.torch_engine import TorchEngine, build_without_values, fill


def build_single(config: ParallelConfig, runtime: Runtime, trainable: Trainable) -> TorchEngine:
    model = build_without_values(trainable.build, runtime.device)
    fill(model, trainable.initial_value)
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
        exchange=lambda _last: nullcontext(),
    )
