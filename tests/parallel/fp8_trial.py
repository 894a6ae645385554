"""Programs for ranks: the tiny GPT of `engine_trial` in emulated fp8, which runs on any device."""

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parallel import build_engine as building
from parallel.bootstrap import Runtime
from parallel.config import ParallelConfig
from parallel.engine import Engine
from parallel.engines.fp8 import in_fp8
from tests.parallel.engine_checks import parts_of
from tests.parallel.engine_trial import config_of, one_step, runtime_of, trainable


def emulated(settings: dict[str, Any]) -> tuple[Engine, Runtime]:
    """An engine in fp8 that rounds to fp8 and multiplies in fp32. Nothing is compiled, unless the settings say so."""
    config = config_of(**{"precision": "fp8", "compile": True, **settings})
    if "compile" not in settings:
        config = config.model_copy(update={"compile": False})
    runtime = runtime_of(_in_bf16(config))
    with mock.patch.object(building, "in_fp8", partial(in_fp8, emulate=True)):
        return building.build_engine(config, runtime, trainable()), runtime


def _in_bf16(config: ParallelConfig) -> ParallelConfig:
    """The same in bf16, which runs on any device."""
    return config.model_copy(update={"precision": "bf16"})


def losses(settings: dict[str, Any], steps: int = 10) -> list[float]:
    """The mean loss of each step in emulated fp8. Collective."""
    engine, runtime = emulated(settings)
    return _losses(engine, runtime, steps)


def losses_in_bf16(settings: dict[str, Any], steps: int = 10) -> list[float]:
    """The same in bf16. Collective."""
    config = config_of(precision="bf16", **settings)
    runtime = runtime_of(config)
    return _losses(building.build_engine(config, runtime, trainable()), runtime, steps)


def _losses(engine: Engine, runtime: Runtime, steps: int) -> list[float]:
    return [sum(one_step(engine, runtime, step)[0]) for step in range(steps)]


def emulated_losses(cases: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """The losses of each case in emulated fp8. Collective."""
    return {name: losses(settings, steps=5) for name, settings in cases.items()}


def all_on_two(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The losses of each case, and how the engine that gathers fp8 keeps and reloads its state. Collective."""
    return {
        "losses": emulated_losses(cases),
        "state": state_of({"engine": "fsdp2", "fp8_scaling": "tensorwise"}),
        "compiled": compiled_losses({"engine": "fsdp2", "fp8_scaling": "tensorwise"}),
    }


def state_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Kinds of tensors in the state, and whether an engine that is filled in place continues with the same bits."""
    first, runtime = emulated(settings)
    second, _ = emulated(settings)
    one_step(first, runtime, 0)
    one_step(second, runtime, 2)
    saved = [part.clone() for part in parts_of(first).values()]
    for part, value in zip(parts_of(second).values(), saved, strict=True):
        part.copy_(value)
    second.refresh_working_weights()
    ours, theirs = ([one_step(engine, runtime, step) for step in (1, 2)] for engine in (first, second))
    held: list[Tensor] = list(parts_of(first).values())
    return {
        "types": sorted({type(part).__name__ for part in held}),
        "dtypes": sorted({str(p.dtype) for p in held}),
        "reloaded": ours == theirs,
    }


def compiled_losses(settings: dict[str, Any]) -> list[float]:
    """The losses of the first steps with compiled blocks. The compiler's backend generates no code."""
    compile_quickly = partial(torch.compile, backend="aot_eager")
    with mock.patch.object(torch, "compile", compile_quickly):
        return losses({**settings, "compile": True}, steps=2)
