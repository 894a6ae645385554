"""Lays a state aside and writes it: shards by all ranks, the manifest and the commit by rank 0.

The manager imports this file at its first save, for DCP brings DTensor, which takes half a second and which a run with
whole tensors does not need for its first step.
"""

import json
from collections.abc import Mapping
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

from parallel.engine import CheckpointTensor
from train.checkpoint import rng
from train.checkpoint.format.manifest import RNG_PREFIX, Manifest, Piece, ShardFile, by_tensor, encode
from train.checkpoint.group import Group, Outcome, attempt, unwrap
from train.checkpoint.saved_state import SavedProgress
from train.checkpoint.shards import ShardWriter, piece_of, shard_name
from train.checkpoint.staging import Staging
from train.checkpoint.stores.protocol import Root


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

    progress: SavedProgress
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
            validation_loss=self.progress.validation_loss,
            extra=self.progress.extra,
            identity=self.facts.identity,
            layout=self.facts.layout,
            rank_states=rank_states,
            versions={name: version(name) for name in ("keepstep", "torch", "safetensors")},
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            files=files,
            pieces=by_tensor(pieces),
        )


class Saver:
    """Who writes what is planned once, for an engine shows the same tensors at every save. `background`: steps go on
    while a job is written, so it gets copies."""

    def __init__(self, group: Group, identity: dict[str, Any], layout: dict[str, Any], background: bool) -> None:
        self._group = group
        self._identity, self._layout = identity, layout
        self._staging = Staging() if background else None
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._plan: SavePlan | None = None

    @property
    def staging_bytes(self) -> int:
        """Host memory held for background saves."""
        return self._staging.bytes if self._staging is not None else 0

    def stage(
        self, progress: SavedProgress, state: Mapping[str, CheckpointTensor], rank_state: Mapping[str, Any]
    ) -> Job:
        """Collective. Afterwards the state may change, if the save is to go on in the background."""
        self._planner.set_up_planner(dict(state), None, self._group.rank == 0)
        if self._plan is None:
            self._plan, self._names = self._make_plan(), state.keys()
        assert state.keys() == self._names, "an engine shows the same tensors at every save"
        plan = self._plan
        staged = attempt(lambda: self._stage(plan))
        random = torch.frombuffer(bytearray(rng.capture()), dtype=torch.uint8)
        facts = Facts(self._identity, self._layout, json.loads(json.dumps(rank_state)))
        return Job(progress, facts, plan, staged, random)

    def _make_plan(self) -> SavePlan:
        """Collective."""
        plans = self._group.gather(self._planner.create_local_plan)
        plan = self._group.scatter(lambda: self._planner.create_global_plan(plans)[0])
        return replace(plan, items=[item for item in plan.items if piece_of(item).bytes])

    def _stage(self, plan: SavePlan) -> dict[MetadataIndex, Tensor]:
        """This rank's pieces."""
        tensors = [_tensor(self._planner.resolve_data(item)) for item in plan.items]
        if self._staging is not None:
            tensors = self._staging.copy(tensors)
        return {item.index: tensor for item, tensor in zip(plan.items, tensors, strict=True)}

    def write_shared(self, job: Job, root: Root) -> int:
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
            place = self._group.on_rank0(begin)
            writer = ShardWriter(root.attempt(place), commit, alive=self._group.alive)
            rank_states = self._group.gather(lambda: job.facts.rank_state)
            written = self._group.gather(lambda: job.write(writer, self._group.rank, root.prefix(place)))
            self._group.on_rank0(lambda: writer.finish(Metadata({}), written))
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


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor), type(value)
    return value
