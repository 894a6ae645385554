"""Stages a state and writes it: each rank writes its shard, rank 0 writes the manifest and commits.

The manager imports this file at its first save. It imports DCP and with it DTensor, which takes half a second that a
run of plain tensors does not need before its first step.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from parallel.engine import CheckpointTensor
from train.checkpoint.format.attachments import TOKENIZER, Attachment, attachment_of
from train.checkpoint.format.manifest import Description, Manifest, describe, join, shard_name
from train.checkpoint.group import Group, Outcome, attempt, results_of
from train.checkpoint.saved_state import About, SavedProgress
from train.checkpoint.shard_writer import ShardWriter, files_and_pieces, piece_of
from train.checkpoint.staging import Staging
from train.checkpoint.stores.protocol import Folder, Root


@dataclass(frozen=True)
class Facts:
    """What the manifest states besides progress and tensors."""

    about: About
    rank_state: Any
    """JSON of this rank."""


@dataclass(frozen=True)
class Job:
    """One save, ready to be written."""

    progress: SavedProgress
    facts: Facts
    plan: SavePlan
    """The items that this rank writes."""
    staged: Outcome
    """This rank's tensors by the items' indices, or the error that staging raised."""

    def write(self, writer: ShardWriter, rank: int, prefix: str = "") -> Description:
        """Write this rank's shard; returns its part of the manifest. Raises the error of staging, if there was one."""
        (tensors,) = results_of([self.staged])
        plan = replace(self.plan, storage_data=prefix + shard_name(rank))
        written = writer.write_data(plan, _StagedTensors(tensors)).value()
        (file,), pieces = files_and_pieces([written])
        return describe(file, rank, pieces)

    def manifest(
        self, rank_states: list[Any], shards: Sequence[Description], attachments: Sequence[Attachment] = ()
    ) -> bytearray:
        """The encoded manifest of the checkpoint, given what each rank has written, in order of rank."""
        about = self.facts.about
        facts = Manifest(
            step=self.progress.step,
            tokens=self.progress.tokens,
            validation_loss=self.progress.validation_loss,
            extra=self.progress.extra,
            identity=about.identity,
            layout=about.layout,
            rank_states=rank_states,
            **written_now(),
            files=[],
            pieces={},
            recipe=about.recipe,
            attachments=list(attachments),
        )
        return join(facts, shards)


def written_now() -> dict[str, Any]:
    """The members of a manifest that say which versions write it, and when."""
    versions = {name: version(name) for name in ("keepstep", "torch", "safetensors")}
    return {"versions": versions, "saved_at": datetime.now(UTC).isoformat(timespec="seconds")}


class Saver:
    """Stages and writes saves. It plans once who writes what, for an engine shows the same tensors at every save.

    With `background`, steps continue while a job is written, so the job gets copies of the tensors."""

    def __init__(self, group: Group, about: About, background: bool) -> None:
        self._group, self._about = group, about
        self._staging = Staging() if background else None
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._plan: SavePlan | None = None

    @property
    def staging_bytes(self) -> int:
        """Host memory used by background saves, in bytes."""
        return self._staging.bytes if self._staging is not None else 0

    def stage(
        self, progress: SavedProgress, state: Mapping[str, CheckpointTensor], rank_state: Mapping[str, Any]
    ) -> Job:
        """Prepare a save. After a background saver returns, the state may change again. Collective."""
        plan = self._planned(state)
        staged = attempt(lambda: self._stage(plan))
        return Job(progress, Facts(self._about, json.loads(json.dumps(rank_state))), plan, staged)

    def prepare(self, state: Mapping[str, CheckpointTensor]) -> None:
        """Plan the saves and allocate the memory for copies, so that the first save need not. Collective."""
        plan = self._planned(state)
        if self._staging is not None:
            self._staging.prepare(self._tensors(plan))

    def _planned(self, state: Mapping[str, CheckpointTensor]) -> SavePlan:
        """What this rank writes, of the tensors as they are now. Collective at the first call."""
        self._planner.set_up_planner(dict(state), None, self._group.rank == 0)
        if self._plan is None:
            self._plan, self._names = self._make_plan(), state.keys()
        assert state.keys() == self._names, "an engine must show the same tensors at every save"
        return self._plan

    def _tensors(self, plan: SavePlan) -> list[Tensor]:
        return [_tensor(self._planner.resolve_data(item)) for item in plan.items]

    def _make_plan(self) -> SavePlan:
        """What this rank writes. Collective."""
        plans = self._group.gather(self._planner.create_local_plan)
        plan = self._group.scatter(lambda: self._planner.create_global_plan(plans)[0])
        return replace(plan, items=[item for item in plan.items if piece_of(item).bytes])

    def _stage(self, plan: SavePlan) -> dict[MetadataIndex, Tensor]:
        """This rank's pieces, copied if saves run in the background."""
        tensors = self._tensors(plan)
        if self._staging is not None:
            tensors = self._staging.copy(tensors)
        return {item.index: tensor for item, tensor in zip(plan.items, tensors, strict=True)}

    def write_shared(self, job: Job, root: Root) -> int:
        """Write and commit a job in a store that all ranks share; returns the bytes of its tensors. Collective.

        On an error, the attempt is removed."""
        attempts: list[str] = []

        def begin() -> str:
            attempts.append(root.begin(job.progress.step))
            return attempts[0]

        def commit() -> None:
            attached = _attach(root.attempt_folder(name), root.prefix(name), job.facts.about.attachments)
            root.commit(name, job.progress.step, job.manifest(rank_states, written, attached))

        try:
            name = self._group.on_rank0(begin)
            writer = ShardWriter(root.attempt_folder(name), alive=self._group.alive)
            gathered = self._group.gather(
                lambda: (job.facts.rank_state, job.write(writer, self._group.rank, root.prefix(name)))
            )
            rank_states, written = [state for state, _ in gathered], [shard for _, shard in gathered]
            self._group.on_rank0(commit)
        except BaseException:
            for name in attempts:
                root.abandon(name)
            raise
        return sum(shard.tensor_bytes for shard in written)


def _attach(folder: Folder, prefix: str, contents: Mapping[str, bytes]) -> list[Attachment]:
    """Write the attachments of an attempt; returns their descriptions."""
    attached = [attachment_of(f"{prefix}{TOKENIZER}{name}", content) for name, content in sorted(contents.items())]
    for attachment in attached:
        folder.write(attachment.name, [contents[attachment.plain_name]])
    return attached


class _StagedTensors(DefaultSavePlanner):
    """Resolves the items of a plan to tensors that were staged before."""

    def __init__(self, tensors: dict[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The staged tensor of an item."""
        return self._tensors[write_item.index]


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor), type(value)
    return value
