"""Staged copies do not depend on their originals and reuse one buffer of host memory."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.checkpoint.staging import Staging, plan_buffers, power_of_two
from train.config import CheckpointConfig


def tensors() -> list[torch.Tensor]:
    return [
        torch.randn(5, 3),
        torch.tensor(3.0),
        torch.arange(7, dtype=torch.uint8),
        torch.randn(9).bfloat16(),
        torch.randn(4, 6).t(),  # not contiguous
        torch.randn(3, dtype=torch.float64),
    ]


def test_copies_are_equal_and_independent() -> None:
    originals = tensors()
    expected = [tensor.clone() for tensor in originals]
    copies = Staging().copy(originals)
    for tensor in originals:
        tensor.zero_()
    assert all(torch.equal(copy, value) for copy, value in zip(copies, expected, strict=True))
    assert all(copy.is_contiguous() for copy in copies)


def test_memory_is_reused_and_counted() -> None:
    staging = Staging()
    assert staging.bytes == 0
    first = staging.copy(tensors())
    size = staging.bytes
    assert sum(tensor.nbytes for tensor in first) <= size <= sum(tensor.nbytes + 64 for tensor in first)
    second = staging.copy(tensors())
    assert staging.bytes == size
    assert [copy.data_ptr() for copy in second] == [copy.data_ptr() for copy in first]


GIB = 2**30


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ([12_100 * 2**20 // 400] * 400, 12.5 * GIB),  # one buffer would take 16 GiB
        ([GIB + 64, GIB - 64, 3 * 2**20], 2 * GIB + 4 * 2**20),  # a large piece shares its buffer
        ([5], 64),
        ([], 0),
    ],
)
def test_pinned_buffers_waste_little(sizes: list[int], limit: float) -> None:
    slots, used = plan_buffers(sizes)
    assert sum(power_of_two(size) for size in used) <= limit
    assert all(slot.offset + size <= used[slot.buffer] for slot, size in zip(slots, sizes, strict=True))


@given(st.lists(st.integers(1, 3 * 2**28), max_size=40))
def test_slots_do_not_overlap_and_are_aligned(sizes: list[int]) -> None:
    slots, used = plan_buffers(sizes)
    parts = sorted((slot.buffer, slot.offset, slot.offset + size) for slot, size in zip(slots, sizes, strict=True))
    assert all(a[0] < b[0] or a[2] <= b[1] for a, b in pairwise(parts))
    assert all(slot.offset % 64 == 0 for slot in slots)
    assert sum(used) <= sum(sizes) + 64 * len(sizes)


def test_memory_that_is_prepared_is_used_by_the_first_save(tmp_path: Path) -> None:
    state = {f"model.{number}": tensor for number, tensor in enumerate(tensors())}
    manager = CheckpointManager(tmp_path, CheckpointConfig(), {}, lambda *_, **__: None)
    manager.prepare(state)
    assert manager._saver is not None
    assert manager._saver._staging is not None
    prepared = [buffer.data_ptr() for buffer in manager._saver._staging._buffers]
    assert manager.staging_bytes > 0
    manager.save(SavedProgress(1, 1), state, {})
    manager.wait()
    assert [buffer.data_ptr() for buffer in manager._saver._staging._buffers] == prepared
    manager.close()


@pytest.mark.gpu
def test_a_save_from_cuda_uses_pinned_memory_and_loads_again(tmp_path: Path) -> None:
    weights = [tensor.cuda() for tensor in tensors()]
    state = {f"model.{number}": tensor for number, tensor in enumerate(weights)}
    manager = CheckpointManager(tmp_path, CheckpointConfig(), {}, lambda *_, **__: None)
    manager.save(SavedProgress(1, 1), state, {})
    expected = [tensor.clone() for tensor in weights]
    for tensor in weights:
        tensor.zero_()
    manager.wait()
    assert manager._saver is not None
    assert manager._saver._staging is not None
    assert all(buffer.is_pinned() for buffer in manager._saver._staging._buffers)
    assert manager.load_newest(state) is not None
    assert all(torch.equal(tensor, value) for tensor, value in zip(weights, expected, strict=True))
    manager.close()
