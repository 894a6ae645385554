"""A full device is reported with what filled it. Only an attempt that has finished a step is tried again."""

import json

import pytest
import torch

from parallel.fragments import FlatFragment
from train.errors import DeviceMemoryError, ExhaustedError
from train.exit_codes import FAILED, OUT_OF_MEMORY
from train.health import device_memory
from train.health.device_memory import GIB, describe, held_bytes, memory_breakdown
from train.health.exhausted import PLAN_VARIABLE, memory_ran_out

STATS = {
    "allocated_bytes.all.current": 60 * GIB,
    "reserved_bytes.all.current": 70 * GIB,
    "num_alloc_retries": 4,
    "free": 2 * GIB,
    "total": 80 * GIB,
}


def test_the_breakdown_adds_up_to_the_device() -> None:
    text = describe(STATS, {"model": 16 * GIB, "optim": 32 * GIB})
    assert text == (
        "of 80.00 GiB: weights 16.00, optimizer state 32.00, gradients, activations and buffers 12.00, "
        "reserved and unused 10.00, other processes and libraries 8.00, free 2.00; 4 retries of the allocator"
    )


def test_what_a_rank_holds_counts_its_own_parts() -> None:
    fragment = FlatFragment(torch.zeros(10), (4, 5), 5)
    assert held_bytes({"model.w": torch.zeros(6), "optim.w.exp_avg": fragment}) == {"model": 24, "optim": 40}


@pytest.mark.parametrize(
    ("progressed", "error", "code"), [(False, DeviceMemoryError, OUT_OF_MEMORY), (True, ExhaustedError, FAILED)]
)
def test_before_its_first_step_a_run_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, progressed: bool, error: type[Exception], code: int
) -> None:
    monkeypatch.setattr(device_memory, "memory_stats", lambda: STATS)
    with pytest.raises(error, match=r"\(CUDA out of memory; of 80.00 GiB: .*\); lower train.micro_batch_size") as got:
        with memory_breakdown(lambda: {"model.w": torch.zeros(6)}, lambda: progressed):
            raise torch.OutOfMemoryError("CUDA out of memory")
    assert got.value.exit_code == code  # pyright: ignore[reportAttributeAccessIssue]
    assert "\n" not in str(got.value)


@pytest.mark.gpu
def test_a_full_device_gives_a_breakdown() -> None:
    held = torch.ones(1 << 20, device="cuda")
    with pytest.raises(DeviceMemoryError, match=r"of \d+\.\d+ GiB: weights 0\.0") as caught:
        with memory_breakdown(lambda: {"model.w": held}, lambda: False):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert "retries of the allocator" in str(caught.value)


def test_the_plan_stands_behind_each_measured_part(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"parts": {"weights": 15 * GIB, "gradients, activations and buffers": 30 * GIB}, "changes": ["a (saves 1)"]}
    monkeypatch.setenv(PLAN_VARIABLE, json.dumps(plan))
    text = describe(STATS, {"model": 16 * GIB, "optim": 32 * GIB})
    assert "weights 16.00 (plan 15.00), optimizer state 32.00, gradients, activations and buffers 12.00 (plan" in text
    assert "; set a (saves 1), or lower train.micro_batch_size" in memory_ran_out(MemoryError(), text)
