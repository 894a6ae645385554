"""The fast tier: checkpoints in a folder of each node (NVMe, /dev/shm), with every shard copied to a peer node.

A node is the ranks that see the same folder. Its folder holds its own shards and those of the node before it, so any
one node may be lost. What is there after a failure is found out by asking everyone: a step counts if each of its shards
is on some node. Each node is then sent the shards that its ranks want to read and it lacks, and the load goes on as
from any folder. A copy that is damaged is removed, and the peer's is taken.
"""

import hashlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.storage import WriteResult

from train.checkpoint.fill import fill, needed_files
from train.checkpoint.format.manifest import (
    MANIFEST,
    DamagedError,
    Manifest,
    Piece,
    ShardFile,
    checksum,
    decode,
    encode,
)
from train.checkpoint.format.verify import read_file, read_manifest
from train.checkpoint.group import Group, attempt, unwrap
from train.checkpoint.load import check
from train.checkpoint.save import Job
from train.checkpoint.saved_state import Loaded, Wanted
from train.checkpoint.shards import ShardWriter, shard_name
from train.checkpoint.stores.local import LocalFolder, LocalRoot, sync_folder

log = logging.getLogger(__name__)

_KEPT = 2
"""Checkpoints of this tier on a node."""
_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Held:
    """What one node has of one step."""

    manifest: str
    """Checksum of its manifest."""
    shards: frozenset[str]
    """Names, of the right size."""
    missing: frozenset[str]


class LocalTier:
    """Collective to construct. `run` tells the checkpoints of several runs on one node apart."""

    def __init__(self, place: Path, run: str, group: Group) -> None:
        self._group = group
        path = place / run_name(run)
        self._root = LocalRoot(path)
        marks = unwrap(group.gather_all(attempt(lambda: _mark(path))))
        self.nodes = [[rank for rank, mark in enumerate(marks) if mark == found] for found in dict.fromkeys(marks)]
        """The ranks of each node."""
        self._node = next(number for number, ranks in enumerate(self.nodes) if group.rank in ranks)
        self._leads = self.nodes[self._node][0] == group.rank

    def save(self, job: Job) -> int:
        """The bytes of its tensors, on rank 0. Collective."""
        begun = attempt(lambda: self._root.begin(job.progress.step) if self._leads else "")
        try:
            places = unwrap(self._group.gather_all(begun))
            folder = self._root.attempt(places[self.nodes[self._node][0]])
            rank_states = self._group.gather(lambda: job.facts.rank_state)
            writer = ShardWriter(folder, lambda *_: None, alive=self._group.alive)
            written = self._group.gather(partial(job.write, writer, self._group.rank))
            self._group.gather(partial(self._swap_shards, folder, folder.size(shard_name(self._group.rank))))
            encoded, size = self._group.on_rank0(lambda: _encoded(job, rank_states, written))
            self._group.gather(lambda: self._leads and self._root.commit(begun[0], job.progress.step, encoded))
        except BaseException:
            if self._leads and begun[0]:
                self._root.abandon(begun[0])
            raise
        self._prune()
        return size

    def _swap_shards(self, folder: LocalFolder, size: int) -> None:
        """Send this rank's shard to a rank of the next node, and keep what comes from the node before. Collective."""
        sizes = self._group.gather_all(size)
        receivers = [self._receiver(rank) for rank in range(self._group.size)]
        mine = receivers[self._group.rank]
        senders = [rank for rank, receiver in enumerate(receivers) if receiver == self._group.rank]
        failure: OSError | None = None
        with ExitStack() as stack:
            files = {rank: stack.enter_context((folder.path / shard_name(rank)).open("xb")) for rank in senders}
            for at in range(0, max(sizes), _CHUNK_BYTES):
                outbox = torch.empty(
                    min(_CHUNK_BYTES, size - at) if mine is not None and at < size else 0, dtype=torch.uint8
                )
                if len(outbox):
                    folder.read_into(shard_name(self._group.rank), at, outbox.numpy().data)
                inbox = {
                    rank: torch.empty(min(_CHUNK_BYTES, sizes[rank] - at), dtype=torch.uint8)
                    for rank in senders
                    if at < sizes[rank]
                }
                self._group.exchange({mine: outbox} if mine is not None and len(outbox) else {}, inbox)
                try:
                    for rank, chunk in inbox.items() if failure is None else ():
                        files[rank].write(chunk.numpy().data)
                except OSError as error:  # the others still send and wait: take part to the end
                    failure = error
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        sync_folder(folder.path)
        if failure is not None:
            raise failure

    def _receiver(self, rank: int) -> int | None:
        """Who keeps a copy of a rank's shard; nobody if there is one node."""
        if len(self.nodes) == 1:
            return None
        number = next(number for number, ranks in enumerate(self.nodes) if rank in ranks)
        peers = self.nodes[(number + 1) % len(self.nodes)]
        return peers[self.nodes[number].index(rank) % len(peers)]

    def _prune(self) -> None:
        if self._leads:
            for step in self._root.steps()[:-_KEPT]:
                self._root.remove(step)
            self._root.sweep()

    def load(self, wanted: Wanted, at_least: int) -> Loaded | None:
        """From the newest step, not below `at_least`, that is complete over all nodes; None without one. Collective."""
        if self._leads:
            self._root.sweep()
        while (found := self._newest(at_least)) is not None:
            step, holdings = found
            source = next(number for number, held in enumerate(holdings) if held is not None)
            read = partial(self._read_manifest, step) if self._group.rank == self.nodes[source][0] else lambda: b""
            encoded = unwrap(self._group.gather_all(attempt(read)))[self.nodes[source][0]]
            manifest = decode(encoded)
            check(self._group, manifest, wanted)
            try:
                self._group.gather(partial(self._fetch, step, manifest, encoded, holdings, wanted))
                return fill(self._root.folder(step), self._group, manifest, wanted)
            except DamagedError as error:
                self._discard(step, manifest, str(error), wanted)
        return None

    def _read_manifest(self, step: int) -> bytes:
        return read_manifest(self._root.folder(step))[1]

    def _newest(self, at_least: int) -> tuple[int, list[Held | None]] | None:
        """The step, and what each node has of it. Collective."""
        mine = {step: held for step in self._root.steps() if (held := self._held(step))} if self._leads else {}
        everyone = self._group.gather_all(mine)
        by_node = [everyone[ranks[0]] for ranks in self.nodes]
        for step in sorted({step for held in by_node for step in held}, reverse=True):
            newest = next(held[step].manifest for held in by_node if step in held)
            holdings = [held.get(step) for held in by_node]
            holdings = [held if held is not None and held.manifest == newest else None for held in holdings]
            there = frozenset().union(*(held.shards for held in holdings if held is not None))
            if step >= at_least and all(held.missing <= there for held in holdings if held is not None):
                return step, holdings
        return None

    def _held(self, step: int) -> Held | None:
        folder = self._root.folder(step)
        try:
            manifest, encoded = read_manifest(folder)
        except DamagedError as error:
            log.warning("%s: %s", folder, error)
            return None
        shards = frozenset(file.name for file in manifest.files if _size(folder, file.name) == file.bytes)
        return Held(checksum(encoded), shards, frozenset(file.name for file in manifest.files) - shards)

    def _fetch(
        self, step: int, manifest: Manifest, encoded: bytes, holdings: list[Held | None], wanted: Wanted
    ) -> None:
        """Give each node the shards that its ranks read and it lacks. Collective."""
        needs = self._group.gather_all(needed_files(self._root.folder(step), manifest, wanted, self._group.rank))
        folder = self._root.folder(step)
        for number, ranks in enumerate(self.nodes):
            held = holdings[number]
            needed = set().union(*(needs[rank] for rank in ranks)) - (held.shards if held is not None else set())
            for name in sorted(needed):
                source = next(node for node, other in enumerate(holdings) if other is not None and name in other.shards)
                self._pass_on(folder, manifest, name, self.nodes[source][0], ranks[0])
            if held is None and self._group.rank == ranks[0]:
                (folder.path / MANIFEST).unlink(missing_ok=True)
                folder.write(MANIFEST, [encoded])

    def _pass_on(self, folder: LocalFolder, manifest: Manifest, name: str, source: int, target: int) -> None:
        """One shard from one leader to another, checked on the way."""
        file = next(file for file in manifest.files if file.name == name)
        if self._group.rank == source:
            try:
                for block in read_file(folder, manifest, file):
                    self._group.exchange({target: torch.tensor([len(block)])}, {})
                    self._group.exchange({target: torch.frombuffer(bytearray(block), dtype=torch.uint8)}, {})
            finally:
                self._group.exchange({target: torch.tensor([0])}, {})  # the end, or the end of what is good
        if self._group.rank == target:
            (folder.path / name).unlink(missing_ok=True)
            blocks = self._received(source)
            try:
                folder.write(name, blocks)
            finally:
                for _ in blocks:  # the source still sends
                    pass

    def _received(self, source: int) -> Iterator[memoryview]:
        size = torch.zeros(1, dtype=torch.int64)
        while True:
            self._group.exchange({}, {source: size})
            if not size:
                return
            block = torch.empty(int(size), dtype=torch.uint8)
            self._group.exchange({}, {source: block})
            yield block.numpy().data

    def _discard(self, step: int, manifest: Manifest, error: str, wanted: Wanted) -> None:
        """Remove the copies that are damaged, or the step if none can be found to be. Collective."""
        folder = self._root.folder(step)
        removed: list[str] = []
        for file in manifest.files if self._leads else ():
            if (folder.path / file.name).exists() and (fault := _fault(folder, manifest, file)):
                (folder.path / file.name).unlink()
                removed.append(f"{folder}: {fault}")
        faults = [fault for faults in self._group.gather_all(removed) for fault in faults]
        if not faults and self._leads:
            self._root.remove(step)
        for fault in faults or [error]:
            wanted.record("quarantined", step=step, error=fault, path=str(folder))


def _mark(path: Path) -> tuple[str, str, int, int]:
    """The same for all ranks that see the same folder. Makes it."""
    path.mkdir(parents=True, exist_ok=True)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot, path.stat().st_dev, path.stat().st_ino


def run_name(run: str) -> str:
    """The folder, within a node's, of the run whose shared checkpoints are at this place."""
    return hashlib.blake2b(run.encode(), digest_size=8).hexdigest()


def _encoded(job: Job, rank_states: list[Any], written: list[list[WriteResult]]) -> tuple[bytes, int]:
    entries = [result.storage_data for results in written for result in results]
    files = [entry for entry in entries if isinstance(entry, ShardFile)]
    manifest = job.manifest(rank_states, files, [entry for entry in entries if isinstance(entry, Piece)])
    return encode(manifest), manifest.tensor_bytes


def _size(folder: LocalFolder, name: str) -> int:
    try:
        return folder.size(name)
    except OSError:
        return -1


def _fault(folder: LocalFolder, manifest: Manifest, file: ShardFile) -> str:
    try:
        for _ in read_file(folder, manifest, file):
            pass
    except DamagedError as error:
        return str(error)
    return ""
