"""On CUDA batches are copied while the device computes. On CPU nothing is copied."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data_pipeline.stream.batch import IGNORE, Batch
from train.device_batch import DeviceBatch, copy_stream, count_targets_by_source, loss_by_source, to_device
from train.model.mlp import Auxiliary

B, T = 3, 8
FIELDS = ("tokens_BT", "labels_BT", "positions_BT", "documents_BT", "sources_B")
HALF_A_SECOND = 2**30
"""Cycles of the device."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def a_batch(first_token: int = 0) -> Batch:
    tokens = np.arange(first_token, first_token + B * T).reshape(B, T)
    labels = np.where(tokens % 4 == 0, IGNORE, tokens + 1)
    positions, documents = np.tile(np.arange(T), (B, 1)), np.zeros((B, T), np.int32)
    return Batch(tokens, labels, positions, documents, np.array([1, 0, 1], np.int32), np.arange(B))


def test_on_cpu_the_tensors_share_the_memory_of_the_arrays() -> None:
    batch = a_batch()
    moved = to_device(batch, torch.device("cpu"))
    for name in FIELDS:
        assert np.shares_memory(getattr(moved, name).numpy(), getattr(batch, name)), name
    assert moved.arrived is None
    moved.await_copy()


def test_the_loss_waits_for_the_copy_before_the_model_reads_it() -> None:
    events: list[str] = []

    class Watched(DeviceBatch):
        def await_copy(self) -> None:
            events.append("copy awaited")

    class Model(nn.Module):
        def forward(self, tokens_BT: Tensor, *_: Any) -> Tensor:
            events.append("read")
            return tokens_BT.float().sum(dim=1)

    batch = Watched(*(torch.as_tensor(getattr(a_batch(), name)) for name in FIELDS), arrived=None)
    loss = loss_by_source(2)(Model(), batch)
    assert events == ["copy awaited", "read"]
    assert loss.sums.tolist() == [92.0, 28.0 + 156.0]
    assert loss.objective.item() == 92.0 + 28.0 + 156.0


def test_a_copy_has_memory_of_its_own_and_takes_over_other_values() -> None:
    first, second = (to_device(a_batch(token), torch.device("cpu")) for token in (0, 100))
    copy = first.copy()
    addresses = [tensor.data_ptr() for tensor in copy.tensors]
    assert not set(addresses) & {tensor.data_ptr() for tensor in first.tensors}
    copy.fill(second)
    assert [tensor.data_ptr() for tensor in copy.tensors] == addresses
    assert all(torch.equal(own, new) for own, new in zip(copy.tensors, second.tensors, strict=True))
    assert first.tokens_BT[0, 0] == 0


def test_an_auxiliary_loss_joins_the_objective_and_metrics_follow_the_losses() -> None:
    class Model(nn.Module):
        def forward(self, tokens_BT: Tensor, *_: Any) -> tuple[Tensor, Auxiliary]:
            return tokens_BT.float().sum(dim=1), Auxiliary(torch.tensor(5.0), torch.tensor([7.0, 8.0]))

    loss = loss_by_source(2)(Model(), to_device(a_batch(), torch.device("cpu")))
    assert loss.sums.tolist() == [92.0, 28.0 + 156.0, 7.0, 8.0]
    assert loss.objective.item() == 92.0 + 28.0 + 156.0 + 5.0


def test_targets_are_counted_by_source_without_ignored_labels() -> None:
    assert count_targets_by_source([a_batch(), a_batch()], 3).tolist() == [12.0, 24.0, 0.0]


@pytest.mark.gpu
@needs_cuda
def test_a_copy_runs_while_the_device_computes() -> None:
    device = torch.device("cuda", 0)
    to_device(a_batch(), device)  # creates the stream and the pinned memory
    torch.cuda.synchronize()
    torch.cuda._sleep(HALF_A_SECOND)
    moved = to_device(a_batch(), device)
    assert moved.arrived is not None
    moved.arrived.synchronize()
    assert not torch.cuda.current_stream().query()


@pytest.mark.gpu
@needs_cuda
def test_the_computation_waits_for_a_late_copy() -> None:
    device, batch = torch.device("cuda", 0), a_batch()
    with torch.cuda.stream(copy_stream(device)):
        torch.cuda._sleep(HALF_A_SECOND)
    moved = to_device(batch, device)
    moved.await_copy()
    read = {name: getattr(moved, name).clone() for name in FIELDS}
    for name in FIELDS:
        assert torch.equal(read[name].cpu(), torch.as_tensor(getattr(batch, name))), name


@pytest.mark.gpu
@needs_cuda
def test_later_copies_do_not_overwrite_a_batch_that_is_still_read() -> None:
    device = torch.device("cuda", 0)
    read = []
    for first in range(0, 1000, 100):
        moved = to_device(a_batch(first), device)
        moved.await_copy()
        torch.cuda._sleep(HALF_A_SECOND // 16)
        read.append(moved.tokens_BT.clone())
        del moved
    for first, tokens_BT in zip(range(0, 1000, 100), read, strict=True):
        assert tokens_BT.cpu().tolist() == a_batch(first).tokens_BT.tolist()
