"""The fast tier: checkpoints in a folder of each node (NVMe, /dev/shm), with a copy of every shard on a peer node.

A node's folder has the shards of its own ranks and of the node before it, so any one node may be lost. After a failure,
all nodes report what they have: a step is complete if each of its shards is on some node. Each node then receives the
shards that its ranks need and that it lacks, and the load continues as from any folder. A damaged copy is removed, and
the peer's copy is used.
"""

import hashlib
import logging
import shutil
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from train.checkpoint.fill import fill, needed_files
from train.checkpoint.format.manifest import MANIFEST, DamagedError, Description, Manifest, checksum, decode, shard_name
from train.checkpoint.format.verify import find_fault, read_manifest
from train.checkpoint.group import Group, attempt, results_of
from train.checkpoint.load import check_fits
from train.checkpoint.nodes import Nodes
from train.checkpoint.save import Job
from train.checkpoint.saved_state import Loaded, LoadRequest
from train.checkpoint.shard_writer import ShardWriter
from train.checkpoint.stores.local import LocalFolder, LocalRoot
from train.checkpoint.transfer import send_shard, swap_shards
from train.errors import CheckpointError

log = logging.getLogger(__name__)

_KEPT = 2
"""Checkpoints that a node keeps in this tier."""


@dataclass(frozen=True)
class Holding:
    """What one node has of one step."""

    manifest: str
    """Checksum of its manifest."""
    shards: frozenset[str]
    """Names of its shards that have the right size."""
    missing: frozenset[str]
    """Names of the other shards of the manifest."""


class LocalTier:
    """The fast tier of one run. Collective to construct. `run` distinguishes runs that share a node's folder."""

    def __init__(self, node_dir: Path, run: str, group: Group) -> None:
        self._group = group
        path = node_dir / run_name(run)
        self._root = LocalRoot(path)
        self._nodes = Nodes(path, group)
        self.unusable: list[str] = []
        """What the last load found and could not use, on any node. Equal on all ranks."""

    def save(self, job: Job) -> int:
        """Write a job to this node and its peer; returns the bytes of its tensors, on rank 0. Collective."""
        group, leads = self._group, self._nodes.is_leader
        begun = attempt(lambda: self._root.begin(job.progress.step) if leads else "")
        try:
            attempts = results_of(group.gather_all(begun))
            folder = self._root.attempt_folder(attempts[self._nodes.leader])
            rank_states = group.gather(lambda: job.facts.rank_state)
            writer = ShardWriter(folder, alive=group.alive)
            written = group.gather(partial(job.write, writer, group.rank))
            group.gather(partial(swap_shards, group, self._nodes, folder, folder.size(shard_name(group.rank))))
            encoded, size = group.on_rank0(lambda: _encoded_manifest(job, rank_states, written))
            group.gather(lambda: leads and self._root.commit(begun.result, job.progress.step, encoded))
        except BaseException:
            if leads and begun.result:
                self._root.abandon(begun.result)
            raise
        self._prune()
        return size

    def _prune(self) -> None:
        if self._nodes.is_leader:
            for step in self._root.steps()[:-_KEPT]:
                self._root.remove(step)
            for damaged in self._root.quarantined():
                shutil.rmtree(damaged, ignore_errors=True)
            self._root.sweep()

    def load(self, request: LoadRequest, at_least: int) -> Loaded | None:
        """Fill the request from the newest step that is complete over all nodes. Collective.

        None if no step from `at_least` on is complete."""
        if self._nodes.is_leader:
            self._root.sweep()
        while (found := self._newest(at_least)) is not None:
            step, holdings = found
            source = self._leader_of_first_holder(holdings)
            read = partial(self._read_manifest, step) if self._group.rank == source else lambda: b""
            encoded = results_of(self._group.gather_all(attempt(read)))[source]
            manifest = decode(encoded)
            self._group.on_rank0(partial(_check_ours, manifest))
            check_fits(self._group, manifest, request)
            try:
                self._group.gather(partial(self._fetch, step, manifest, encoded, holdings, request))
                return fill(self._root.folder(step), self._group, manifest, request)
            except DamagedError as error:
                self._discard(step, manifest, str(error), request)
        self.unusable = self._remains()
        return None

    def _remains(self) -> list[str]:
        """All checkpoints that any node still has, incomplete and damaged ones. Collective."""
        left: list[str] = []
        if self._nodes.is_leader:
            paths = [*(str(self._root.folder(step)) for step in self._root.steps()), *self._root.quarantined()]
            left = [f"{path} on {socket.gethostname()}" for path in paths]
        return sorted({path for paths in self._group.gather_all(left) for path in paths})

    def _leader_of_first_holder(self, holdings: list[Holding | None]) -> int:
        node = next(number for number, holding in enumerate(holdings) if holding is not None)
        return self._nodes.ranks[node][0]

    def _read_manifest(self, step: int) -> bytes:
        return read_manifest(self._root.folder(step))[1]

    def _newest(self, at_least: int) -> tuple[int, list[Holding | None]] | None:
        """The newest complete step from `at_least` on, and what each node has of it. Collective."""
        own: dict[int, Holding] = {}
        if self._nodes.is_leader:
            own = {step: holding for step in self._root.steps() if (holding := self._holding(step))}
        by_rank = self._group.gather_all(own)
        by_node = [by_rank[ranks[0]] for ranks in self._nodes.ranks]
        for step in sorted({step for held in by_node for step in held}, reverse=True):
            newest = next(held[step].manifest for held in by_node if step in held)
            holdings = [held.get(step) for held in by_node]
            holdings = [holding if holding and holding.manifest == newest else None for holding in holdings]
            available = frozenset().union(*(holding.shards for holding in holdings if holding))
            if step >= at_least and all(holding.missing <= available for holding in holdings if holding):
                return step, holdings
        return None

    def _holding(self, step: int) -> Holding | None:
        """What this node has of a step; None if its manifest is damaged, or not one that this version reads."""
        folder = self._root.folder(step)
        try:
            manifest, encoded = read_manifest(folder)
        except CheckpointError as error:
            log.warning("%s: %s", folder, error)
            return None
        shards = frozenset(file.name for file in manifest.files if _size(folder, file.name) == file.bytes)
        return Holding(checksum(encoded), shards, frozenset(file.name for file in manifest.files) - shards)

    def _fetch(
        self, step: int, manifest: Manifest, encoded: bytes, holdings: list[Holding | None], request: LoadRequest
    ) -> None:
        """Give each node the shards that its ranks need and that it lacks. Collective."""
        folder = self._root.folder(step)
        needs = self._group.gather_all(needed_files(folder, manifest, request))
        for ranks, holding in zip(self._nodes.ranks, holdings, strict=True):
            leader = ranks[0]
            present = holding.shards if holding is not None else frozenset()
            for name in sorted(set().union(*(needs[rank] for rank in ranks)) - present):
                node = next(number for number, other in enumerate(holdings) if other and name in other.shards)
                send_shard(self._group, folder, manifest, name, self._nodes.ranks[node][0], leader)
            if holding is None and self._group.rank == leader:
                (folder.path / MANIFEST).unlink(missing_ok=True)
                folder.write(MANIFEST, [encoded])

    def _discard(self, step: int, manifest: Manifest, error: str, request: LoadRequest) -> None:
        """Remove the damaged copies, or quarantine the step if no damaged copy is found. Collective."""
        folder = self._root.folder(step)
        removed: list[str] = []
        for file in manifest.files if self._nodes.is_leader else ():
            if (folder.path / file.name).exists() and (fault := find_fault(folder, manifest, file)):
                (folder.path / file.name).unlink()
                removed.append(f"{folder}: {fault}")
        faults = [fault for faults in self._group.gather_all(removed) for fault in faults]
        if not faults and self._nodes.is_leader and step in self._root.steps():
            self._root.quarantine(step)
        for fault in faults or [error]:
            request.record("quarantined", step=step, error=fault, path=str(folder))


def _check_ours(manifest: Manifest) -> None:
    """CheckpointError unless a run wrote the checkpoint to this tier: imports go to the shared one."""
    names = {shard_name(rank) for rank in range(len(manifest.files))}
    if "imported" in manifest.extra or {file.name for file in manifest.files} != names:
        raise CheckpointError(
            f"the fast tier has a checkpoint of step {manifest.step} that no run of Keepstep saved there; remove it, "
            "or set checkpoint.local_dir to another folder"
        )


def run_name(run: str) -> str:
    """Name of a run's folder inside a node's folder, from the absolute location of its shared checkpoints.

    A copy of a run in another place has another name, so it does not resume from the original's fast tier."""
    location = run if "://" in run else str(Path(run).resolve())
    return hashlib.blake2b(location.encode(), digest_size=8).hexdigest()


def _encoded_manifest(job: Job, rank_states: list[Any], written: list[Description]) -> tuple[bytearray, int]:
    return job.manifest(rank_states, written), sum(shard.tensor_bytes for shard in written)


def _size(folder: LocalFolder, name: str) -> int:
    """Size of a file in bytes; -1 if it does not exist."""
    try:
        return folder.size(name)
    except OSError:
        return -1
