"""The one place where an engine is chosen."""

from parallel.bootstrap import Runtime
from parallel.config import ParallelConfig
from parallel.engine import Engine, Trainable
from parallel.engines.fp8 import in_fp8


def build_engine(config: ParallelConfig, runtime: Runtime, trainable: Trainable) -> Engine:
    """The engine that the recipe names, with initial weights. Collective. Raises what `build_empty_engine` raises."""
    engine = build_empty_engine(config, runtime, trainable)
    engine.draw_initial_values(trainable.initial_value)
    return engine


def build_empty_engine(config: ParallelConfig, runtime: Runtime, trainable: Trainable) -> Engine:
    """The engine that the recipe names, whose weights must be loaded or drawn before its first step. Collective.

    Raises LaunchError if something that the engine needs is not available."""
    if config.precision == "fp8":
        trainable = in_fp8(trainable, config)
    match config.engine:
        case "single":
            from parallel.engines.single import build_single

            return build_single(config, runtime, trainable)
        case "ddp":
            from parallel.engines.ddp import build_ddp

            return build_ddp(config, runtime, trainable)
        case "fsdp2":
            from parallel.engines.fsdp2 import build_fsdp2

            return build_fsdp2(config, runtime, trainable)
        case "zero1" | "zero2" | "zero3":
            from parallel.engines.zero.engine import build_zero

            return build_zero(config, runtime, trainable)
