"""Every engine and layout trains the same model: same first bits, same losses, norms, weights and optimizer state.

Each case is compared with one process over ten steps of a tiny GPT without dropout. A step has two micro batches, with
unequal numbers of targets per rank and micro batch; one row has no target.
"""

from typing import Any

import pytest
import torch

from tests.parallel.engine_trial import config_of, train
from tests.parallel.ranks import run_ranks

PROGRAM = "tests/parallel/engine_trial.py"
FP32_TOLERANCE = 1e-5
EMA_DECAY = 0.3
"""Reached from step 6 on; before, the average follows the weights faster."""
BF16_LOSS_TOLERANCE, BF16_NORM_TOLERANCE = 2e-3, 3e-2
"""Relative to fp32: bf16 keeps 8 bits, and gradients pass through three blocks of it."""

ZERO = {f"zero{stage}": {"engine": f"zero{stage}"} for stage in (1, 2, 3)}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"fsdp2": {"engine": "fsdp2"}, "zero3": {"engine": "zero3"}},
    2: {
        "ddp": {"engine": "ddp"},
        "fsdp2": {"engine": "fsdp2"},
        "fsdp2, gathered once": {"engine": "fsdp2", "reshard_after_forward": False},
        "fsdp2, reduced once": {"engine": "fsdp2", "reduce_every_micro_batch": False},
        "tensor": {"engine": "fsdp2", "tensor": 2},
        "zero2, offloaded": {"engine": "zero2", "cpu_offload": True},
        **ZERO,
    },
    4: {
        "ddp": {"engine": "ddp"},
        "fsdp2": {"engine": "fsdp2"},
        "hsdp": {"engine": "fsdp2", "replicate": 2},
        "fsdp2 x tensor": {"engine": "fsdp2", "tensor": 2},
        "ddp x tensor": {"engine": "ddp", "tensor": 2},
        **ZERO,
    },
}
CASES = [(world_size, name) for world_size, cases in LAYOUTS.items() for name in cases]
BF16 = {
    name: {**settings, "precision": "bf16", "activation_checkpointing": recompute}
    for name, settings, recompute in (
        ("ddp", {"engine": "ddp"}, "none"),
        ("fsdp2", {"engine": "fsdp2"}, "selective"),
        ("tensor", {"engine": "fsdp2", "tensor": 2}, "full"),
        ("zero1", ZERO["zero1"], "full"),
        ("zero2", ZERO["zero2"], "none"),
        ("zero3", ZERO["zero3"], "selective"),
    )
}
MUP: dict[str, Any] = {"mup": {"base_width": 16}}
"""A quarter of the model's width, so that groups of parameters differ in their learning rates."""
MUP_CASES = {name: LAYOUTS[2][name] for name in ("ddp", "fsdp2", "tensor", *ZERO)}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train(config_of(engine="single"), ema_decay=EMA_DECAY)


@pytest.fixture(scope="module")
def together() -> dict[int, dict[str, Any]]:
    """Rank 0's results by world size and name."""
    cases = {n: _averaging(layouts | _bf16(n)) | _mup(n) for n, layouts in LAYOUTS.items()}
    return {n: run_ranks(PROGRAM, "train_each", n, of_size)[0] for n, of_size in cases.items()}


def _averaging(cases: dict[str, Any]) -> dict[str, Any]:
    return {name: {**settings, "model": {"ema_decay": EMA_DECAY}} for name, settings in cases.items()}


def _bf16(world_size: int) -> dict[str, Any]:
    return {f"bf16 {name}": settings for name, settings in BF16.items()} if world_size == 2 else {}


def _mup(world_size: int) -> dict[str, Any]:
    cases = MUP_CASES if world_size == 2 else {}
    return {f"muP {name}": {**settings, "model": MUP} for name, settings in cases.items()}


def relative(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def difference(ours: dict[str, Any], theirs: dict[str, Any], prefix: str) -> float:
    """The largest absolute difference over the tensors whose names begin with `prefix`."""
    names = [name for name in theirs if name.startswith(prefix)]
    return max((ours[name] - theirs[name]).abs().max().item() for name in names)


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_the_first_weights_are_the_same_bits(alone: Any, together: Any, world_size: int, name: str) -> None:
    ours, theirs = together[world_size][name]["before"], alone["before"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_losses_and_norms_agree_with_one_process(alone: Any, together: Any, world_size: int, name: str) -> None:
    result = together[world_size][name]
    assert relative(result["losses"], alone["losses"]) < FP32_TOLERANCE
    assert relative(result["norms"], alone["norms"]) < FP32_TOLERANCE
    for name in ("validation", "validation of the average"):
        assert relative(result[name].tolist(), alone[name].tolist()) < FP32_TOLERANCE
    of_average, of_weights = (result[name].sum() for name in ("validation of the average", "validation"))
    assert abs(of_average - of_weights) > 10 * FP32_TOLERANCE * of_weights


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_final_weights_and_optimizer_state_agree_with_one_process(
    alone: Any, together: Any, world_size: int, name: str
) -> None:
    ours, theirs = together[world_size][name]["after"], alone["after"]
    assert difference(ours, theirs, "model.") < FP32_TOLERANCE
    assert difference(ours, theirs, "optim.") < FP32_TOLERANCE
    assert all(step.item() == 10 for key, step in ours.items() if key.endswith(".step"))
    averages = [key for key in ours if key.endswith(".average")]
    assert len(averages) == sum(key.startswith("model.") for key in ours)
    assert all(not torch.equal(ours[key], ours[f"model.{key[6:-8]}"]) for key in averages)


@pytest.mark.parametrize("name", BF16)
def test_bf16_stays_within_its_tolerance_of_fp32(alone: Any, together: Any, name: str) -> None:
    result = together[2][f"bf16 {name}"]
    assert relative(result["losses"], alone["losses"]) < BF16_LOSS_TOLERANCE
    assert relative(result["norms"], alone["norms"]) < BF16_NORM_TOLERANCE


@pytest.mark.parametrize("name", BF16)
def test_bf16_keeps_unrounded_fp32_masters_that_change(alone: Any, together: Any, name: str) -> None:
    result = together[2][f"bf16 {name}"]
    assert all(torch.equal(result["before"][key], value) for key, value in alone["before"].items())
    gains = [value for key, value in result["after"].items() if key.startswith("model.") and "norm.weight" in key]
    assert gains
    assert all(gain.dtype == torch.float32 and (gain != 1.0).all() for gain in gains)


@pytest.fixture(scope="module")
def alone_with_mup() -> dict[str, Any]:
    return train(config_of(engine="single"), **MUP)


@pytest.mark.parametrize("name", MUP_CASES)
def test_groups_with_their_own_learning_rates_agree_with_one_process(
    alone: Any, alone_with_mup: Any, together: Any, name: str
) -> None:
    result, theirs = together[2][f"muP {name}"], alone_with_mup
    assert relative(result["losses"], theirs["losses"]) < FP32_TOLERANCE
    assert relative(result["norms"], theirs["norms"]) < FP32_TOLERANCE
    assert difference(result["after"], theirs["after"], "model.") < FP32_TOLERANCE
    assert relative(theirs["losses"], alone["losses"]) > 100 * FP32_TOLERANCE, "muP changes the run"


def test_runs_of_the_same_layout_are_bit_equal(together: Any) -> None:
    unequal = [(n, name) for n, cases in together.items() for name, case in cases.items() if not case["repeated"]]
    assert not unequal


def test_the_tied_head_stays_tied_and_is_counted_once(together: Any) -> None:
    names = {(n, name): case["after"].keys() for n, cases in together.items() for name, case in cases.items()}
    assert all("model.embed.weight" in keys and "model.head.weight" not in keys for keys in names.values())


@pytest.mark.slow
def test_compiled_blocks_train_the_same_model(alone: Any) -> None:
    cases = {engine: {"engine": engine, "compile": True} for engine in ("ddp", "fsdp2", "zero3")}
    cases["fsdp2"]["activation_checkpointing"] = "full"
    for result in run_ranks(PROGRAM, "train_each", 2, cases, timeout=1200)[0].values():
        assert relative(result["losses"], alone["losses"]) < FP32_TOLERANCE
        assert relative(result["norms"], alone["norms"]) < FP32_TOLERANCE
