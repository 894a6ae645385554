"""Programs for ranks: the tiny GPT of `engine_trial` in emulated fp8, which runs on any device."""

import dataclasses
from functools import partial
from typing import Any

from parallel.build_engine import build_engine
from parallel.engine import Trainable
from parallel.engines.fp8 import build_in_fp8
from tests.parallel.engine_trial import config_of, one_step, runtime_of, trainable


def emulated() -> Trainable:
    """The tiny GPT with fp8 emulated in fp32."""
    plain = trainable()
    return dataclasses.replace(plain, build=partial(build_in_fp8, plain.build, emulate=True))


def losses(settings: dict[str, Any], model: Trainable, steps: int = 10) -> list[float]:
    """The mean loss of each step. Collective."""
    config = config_of(precision="bf16", **settings)
    runtime = runtime_of(config)
    engine = build_engine(config, runtime, model)
    return [sum(one_step(engine, runtime, step)[0]) for step in range(steps)]


def emulated_losses(cases: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """The losses of each case in emulated fp8. Collective."""
    return {name: losses(settings, emulated()) for name, settings in cases.items()}
