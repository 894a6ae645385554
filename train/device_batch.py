"""A micro batch as tensors on the device, and the loss function that engines take.

On CUDA a step's micro batches are copied from pinned memory on a separate stream, in order. All copies start before the
first micro batch is computed. So the copies run beside the computation, at least one micro batch ahead of it. The
computation waits, on the device, for each copy where it begins to read it.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.stream.batch import IGNORE, Batch
from parallel.engine import BatchLoss, LossFn


@dataclass(frozen=True)
class DeviceBatch:
    """The tensors of `data_pipeline.stream.batch.Batch`, on the device. B sequences, T tokens."""

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor
    sources_B: Tensor
    arrived: torch.cuda.Event | None = None
    """End of the copy; None if the copy was not made on a separate stream."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the fields."""
        return self.tokens_BT, self.labels_BT, self.positions_BT, self.documents_BT, self.sources_B

    def await_copy(self) -> None:
        """Make the current stream wait for the copy. The host does not wait."""
        if self.arrived is None:
            return
        stream = torch.cuda.current_stream(self.tokens_BT.device)
        stream.wait_event(self.arrived)
        for tensor in self.tensors:
            tensor.record_stream(stream)  # its memory belongs to the copy stream, which must not reuse it too early

    def copy(self) -> "DeviceBatch":
        """The same values in memory of its own."""
        self.await_copy()
        return DeviceBatch(*(tensor.clone() for tensor in self.tensors), arrived=None)

    def fill(self, other: "DeviceBatch") -> None:
        """Take over the values of a batch of the same shapes."""
        other.await_copy()
        for own, new in zip(self.tensors, other.tensors, strict=True):
            own.copy_(new)


def to_device(batch: Batch, device: torch.device) -> DeviceBatch:
    """The batch on the device. On CPU it shares the arrays' memory; on CUDA the copies may still run (`await_copy`)."""
    arrays = (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT, batch.sources_B)
    tensors = [torch.as_tensor(array) for array in arrays]
    if device.type != "cuda":
        return DeviceBatch(*(tensor.to(device, non_blocking=True) for tensor in tensors), arrived=None)
    stream = copy_stream(device)
    with torch.cuda.stream(stream):
        copies = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    arrived = torch.cuda.Event()
    arrived.record(stream)
    return DeviceBatch(*copies, arrived=arrived)


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the device on which all batches are copied."""
    return torch.cuda.Stream(device)


def loss_by_source(n_sources: int) -> LossFn:
    """A loss function whose sums are the summed loss in nats of each data source, then the model's metric sums."""

    def loss_fn(model: nn.Module, batch: DeviceBatch) -> BatchLoss:
        batch.await_copy()
        output = model(batch.tokens_BT, batch.positions_BT, batch.documents_BT, batch.labels_BT)
        loss_B, auxiliary = (output, None) if isinstance(output, Tensor) else output
        loss_S = loss_B @ F.one_hot(batch.sources_B.long(), n_sources).to(loss_B.dtype)
        if auxiliary is None:
            return BatchLoss(objective=loss_S.sum(), sums=loss_S)
        return BatchLoss(loss_S.sum() + auxiliary.loss, torch.cat((loss_S, auxiliary.metrics_M)))

    return loss_fn


def count_targets_by_source(batches: list[Batch], n_sources: int) -> Tensor:
    """Number of targets (labels that are not IGNORE) of this rank's micro batches by source: (S,), float64, on CPU."""
    counts_S = torch.zeros(n_sources, dtype=torch.float64)
    for batch in batches:
        targets_B = torch.as_tensor((batch.labels_BT != IGNORE).sum(axis=1)).double()
        counts_S.index_add_(0, torch.as_tensor(batch.sources_B).long(), targets_B)
    return counts_S
