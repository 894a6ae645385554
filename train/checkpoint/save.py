"""Writes one checkpoint from what was laid aside: shards by all ranks, the manifest and the commit by rank 0."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from train.checkpoint.folder import Root
from train.checkpoint.format import RNG_PREFIX, Manifest, Piece, ShardFile, by_tensor, encode
from train.checkpoint.group import Group, Outcome, unwrap
from train.checkpoint.load import Progress
from train.checkpoint.storage import ShardWriter, shard_name


@dataclass(frozen=True)
class Facts:
    """What the manifest says besides the tensors."""

    identity: dict[str, Any]
    layout: dict[str, Any]
    rank_state: Any
    """Of this rank."""


@dataclass(frozen=True)
class Job:
    """One save, ready to be written."""

    progress: Progress
    facts: Facts
    plan: SavePlan
    """What this rank writes."""
    staged: Outcome
    """This rank's tensors by the plan's items, or why they could not be laid aside."""
    random: Tensor

    def write(self, writer: ShardWriter, rank: int, prefix: str = "") -> list[WriteResult]:
        """This rank's shard."""
        (tensors,) = unwrap([self.staged])
        item = _own_item(f"{RNG_PREFIX}{rank:05d}", self.random)
        plan = replace(self.plan, items=[*self.plan.items, item], storage_data=prefix + shard_name(rank))
        return writer.write_data(plan, _Staged(tensors | {item.index: self.random})).value()

    def manifest(self, rank_states: list[Any], files: list[ShardFile], pieces: list[Piece]) -> Manifest:
        return Manifest(
            step=self.progress.step,
            tokens=self.progress.tokens,
            held_out_loss=self.progress.held_out_loss,
            extra=self.progress.extra,
            identity=self.facts.identity,
            layout=self.facts.layout,
            rank_states=rank_states,
            versions={name: version(name) for name in ("keepstep", "torch", "safetensors")},
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            files=files,
            pieces=by_tensor(pieces),
        )


def save_shared(job: Job, root: Root, group: Group) -> int:
    """To a place that all ranks share. The bytes of its tensors, on rank 0. Collective."""
    begun: list[str] = []
    size = [0]

    def begin() -> str:
        begun.append(root.begin(job.progress.step))
        return begun[0]

    def commit(files: list[ShardFile], pieces: list[Piece]) -> None:
        manifest = job.manifest(rank_states, files, pieces)
        root.commit(place, job.progress.step, encode(manifest))
        size[0] = manifest.tensor_bytes

    try:
        place = group.on_rank0(begin)
        writer = ShardWriter(root.attempt(place), commit)
        rank_states = group.gather(lambda: job.facts.rank_state)
        written = group.gather(lambda: job.write(writer, group.rank, root.prefix(place)))
        group.on_rank0(lambda: writer.finish(Metadata({}), written))
    except BaseException:
        for place in begun:
            root.abandon(place)
        raise
    return size[0]


class _Staged(DefaultSavePlanner):
    """Resolves a plan's items to tensors that were laid aside before."""

    def __init__(self, tensors: dict[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index]


def _own_item(name: str, tensor: Tensor) -> WriteItem:
    """One rank's own tensor, which no other rank has."""
    chunk = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.size())
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.TENSOR, tensor_data=data)
