"""A micro batch as tensors on the device, and the loss that engines take."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.batch import IGNORE, Batch
from parallel.engine import LossFn


@dataclass(frozen=True)
class DeviceBatch:
    """The tensors of `data_pipeline.batch.Batch`. B sequences, T tokens."""

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor
    sources_B: Tensor


def to_device(batch: Batch, device: torch.device) -> DeviceBatch:
    """Copies run behind the computation where the device allows."""

    def move(array: object) -> Tensor:
        tensor = torch.as_tensor(array)
        if device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    arrays = (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT, batch.sources_B)
    return DeviceBatch(*map(move, arrays))


def loss_by_source(n_sources: int) -> LossFn:
    """Summed loss in nats of a micro batch, one entry per data source, shape (S,), fp32."""

    def loss_fn(model: nn.Module, batch: DeviceBatch) -> Tensor:
        loss_B = model(batch.tokens_BT, batch.positions_BT, batch.documents_BT, batch.labels_BT)
        return loss_B @ F.one_hot(batch.sources_B.long(), n_sources).to(loss_B.dtype)

    return loss_fn


def labels_by_source(batches: list[Batch], n_sources: int) -> Tensor:
    """Targets (labels that are not IGNORE) of this rank's micro batches by source, shape (S,), float64, on the host."""
    counts_S = torch.zeros(n_sources, dtype=torch.float64)
    for batch in batches:
        targets_B = torch.as_tensor((batch.labels_BT != IGNORE).sum(axis=1)).double()
        counts_S.index_add_(0, torch.as_tensor(batch.sources_B).long(), targets_B)
    return counts_S
