"""Staged copies do not depend on their originals and reuse one buffer of host memory."""

from pathlib import Path

import pytest
import torch

from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.checkpoint.staging import Staging
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
    assert manager._saver._staging._buffer.is_pinned()
    assert manager.load_newest(state) is not None
    assert all(torch.equal(tensor, value) for tensor, value in zip(weights, expected, strict=True))
    manager.close()
