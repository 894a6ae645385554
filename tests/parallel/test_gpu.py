"""The engines on one CUDA device with nccl, against one CPU process. Run by hand: `pytest -m gpu tests/parallel`."""

import importlib.util
from typing import Any

import pytest
import torch

from parallel.bootstrap import seed_rank
from parallel.build_engine import build_engine
from parallel.engines.normal import standard_normal
from tests.parallel.engine_trial import LOSS, config_of, micro_batches, runtime_of, train, trainable
from tests.parallel.fp8_trial import losses
from tests.parallel.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
ENGINES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
CASES = (
    {
        f"{engine}, {precision}": {"engine": engine, "precision": precision, "device": "cuda"}
        for engine in ENGINES
        for precision in ("fp32", "bf16", "fp16")
    }
    | {"fsdp2, compiled": {"engine": "fsdp2", "device": "cuda", "compile": True}}
    | {f"{engine}, graphs": {"engine": engine, "device": "cuda", "cuda_graphs": True} for engine in ("single", "ddp")}
)
FP8 = {
    f"{engine}, {scaling}": {
        "engine": engine,
        "precision": "fp8",
        "fp8_scaling": scaling,
        "device": "cuda",
        "compile": True,
    }
    for engine in ("single", "ddp", "fsdp2")
    for scaling in ("rowwise", "tensorwise")
}
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-3, "fp16": 1e-3, "compiled": 1e-4, "graphs": 1e-4}


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
    expected = losses({"engine": "single", "fp8_scaling": FP8[name]["fp8_scaling"]})
    # FSDP2 casts the masters to fp8 itself; the others cast the copies in bf16.
    assert found["losses"] == pytest.approx(expected, rel=1e-2 if name == "fsdp2, tensorwise" else 3e-3)
    assert found["losses"] != pytest.approx(curves["single, bf16"]["losses"], rel=1e-6)


def test_dropout_under_a_graph_has_new_masks_in_each_replay_and_repeats_with_the_seed() -> None:
    config = config_of(engine="single", device="cuda", cuda_graphs=True)
    runtime = runtime_of(config)
    engine = build_engine(config, runtime, trainable(dropout=0.5))
    batches, _ = micro_batches(1, runtime, number=1)

    def sums() -> list[float]:
        return engine.forward_backward(batches, LOSS, 1.0).tolist()

    seed_rank(1, runtime)
    first, second = sums(), sums()
    seed_rank(1, runtime)
    assert sums() == first != second


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_exchanges_beside_products_train_like_those_between_them() -> None:
    settings = {"engine": "fsdp2", "device": "cuda", "tensor": 2, "compile": True}
    cases = {"between": settings, "beside": {**settings, "async_tensor": True}}
    found = run_ranks("tests/parallel/engine_trial.py", "train_each", 2, cases)[0]
    assert found["beside"]["losses"] == pytest.approx(found["between"]["losses"], rel=1e-4)
