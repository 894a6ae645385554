"""The engines on one CUDA device with nccl, against one CPU process. Run by hand: `pytest -m gpu tests/parallel`."""

import importlib.util
from typing import Any

import pytest
import torch

from parallel.engines.normal import standard_normal
from tests.parallel.engine_trial import config_of, train
from tests.parallel.fp8_trial import emulated, losses
from tests.parallel.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
ENGINES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
CASES = {
    f"{engine}, {precision}": {"engine": engine, "precision": precision, "device": "cuda"}
    for engine in ENGINES
    for precision in ("fp32", "bf16", "fp16")
} | {"fsdp2, compiled": {"engine": "fsdp2", "device": "cuda", "compile": True}}
FP8 = {
    f"{engine}, {'compiled' if compiled else 'eager'}": {
        "engine": engine,
        "precision": "fp8",
        "device": "cuda",
        "compile": compiled,
    }
    for engine in ("single", "ddp", "fsdp2")
    for compiled in (False, True)
}
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-3, "fp16": 1e-3, "compiled": 1e-4}


@pytest.fixture(scope="module")
def curves() -> dict[str, Any]:
    alone = {name: settings for name, settings in CASES.items() if settings["engine"] == "single"}
    grouped = {
        name: settings
        for name, settings in CASES.items()
        if settings["engine"] != "single" and (HAS_DEEPSPEED or not settings["engine"].startswith("zero"))
    }
    program = "tests/parallel/engine_trial.py"
    return run_ranks(program, "train_each", 1, grouped)[0] | run_ranks(program, "train_each", 1, alone)[0]


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, Any]:
    return train(config_of(engine="single"))


def test_the_device_draws_the_initial_values_of_the_cpu() -> None:
    pairs = torch.arange(1 << 40, (1 << 40) + 100_001)
    assert torch.equal(standard_normal(3, pairs.cuda()).cpu(), standard_normal(3, pairs))


@pytest.mark.parametrize("name", CASES)
def test_the_device_trains_like_the_cpu(curves: dict[str, Any], on_cpu: dict[str, Any], name: str) -> None:
    if name.startswith("zero") and not HAS_DEEPSPEED:
        pytest.skip("DeepSpeed is not installed")
    tolerance = TOLERANCE[name.split(", ")[1]]
    assert curves[name]["losses"] == pytest.approx(on_cpu["losses"], rel=tolerance)
    assert curves[name]["repeated"]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="fp8 needs compute capability 9.0",
)
@pytest.mark.parametrize("name", FP8)
def test_fp8_on_the_device_trains_like_fp8_emulated_on_the_cpu(curves: dict[str, Any], name: str) -> None:
    found = run_ranks("tests/parallel/engine_trial.py", "train_each", 1, {name: FP8[name]})[0][name]
    assert found["losses"] == pytest.approx(losses({"engine": "single"}, emulated()), rel=3e-3)
    assert found["losses"] != pytest.approx(curves["single, bf16"]["losses"], rel=1e-6)
