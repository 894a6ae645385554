"""Sends shards between the nodes of the fast tier."""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import torch

from train.checkpoint.format.manifest import Manifest, shard_name
from train.checkpoint.format.verify import read_file
from train.checkpoint.group import Group
from train.checkpoint.nodes import Nodes
from train.checkpoint.stores.local import LocalFolder, sync_folder

_CHUNK_BYTES = 16 * 2**20


def swap_shards(group: Group, nodes: Nodes, folder: LocalFolder, size: int) -> None:
    """Send this rank's shard (`size` bytes) to a rank of the next node and store those it receives. Collective.

    OSError if a received shard cannot be stored."""
    sizes = group.gather_all(size)
    receivers = [nodes.receiver(rank) for rank in range(group.size)]
    receiver = receivers[group.rank]
    senders = [rank for rank, its_receiver in enumerate(receivers) if its_receiver == group.rank]
    failure: OSError | None = None
    with ExitStack() as stack:
        files = {rank: stack.enter_context((folder.path / shard_name(rank)).open("xb")) for rank in senders}
        for at in range(0, max(sizes), _CHUNK_BYTES):
            outbox: dict[int, torch.Tensor] = {}
            if receiver is not None and at < size:
                outbox[receiver] = torch.empty(min(_CHUNK_BYTES, size - at), dtype=torch.uint8)
                folder.read_into(shard_name(group.rank), at, outbox[receiver].numpy().data)
            inbox = {
                rank: torch.empty(min(_CHUNK_BYTES, sizes[rank] - at), dtype=torch.uint8)
                for rank in senders
                if at < sizes[rank]
            }
            group.exchange(outbox, inbox)
            try:
                for rank, chunk in inbox.items() if failure is None else ():
                    files[rank].write(chunk.numpy().data)
            except OSError as error:  # the other ranks still send and receive, so continue to the end
                failure = error
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    sync_folder(folder.path)
    if failure is not None:
        raise failure


def send_shard(group: Group, folder: LocalFolder, manifest: Manifest, name: str, source: int, target: int) -> None:
    """Copy one shard from rank `source` to rank `target` and verify it on the way. Other ranks do nothing.

    DamagedError on the source if its copy is damaged; the copy on the target is then incomplete."""
    file = next(file for file in manifest.files if file.name == name)
    if group.rank == source:
        try:
            for block in read_file(folder, manifest, file):
                group.exchange({target: torch.tensor([len(block)])}, {})
                group.exchange({target: torch.frombuffer(bytearray(block), dtype=torch.uint8)}, {})
        finally:
            group.exchange({target: torch.tensor([0])}, {})  # the end of the file, or of its good part
    if group.rank == target:
        (folder.path / name).unlink(missing_ok=True)
        blocks = _received_blocks(group, source)
        try:
            folder.write(name, blocks)
        finally:
            for _ in blocks:  # after an error, take what the source still sends
                pass


def _received_blocks(group: Group, source: int) -> Iterator[memoryview]:
    size = torch.zeros(1, dtype=torch.int64)
    while True:
        group.exchange({}, {source: size})
        if not size:
            return
        block = torch.empty(int(size), dtype=torch.uint8)
        group.exchange({}, {source: block})
        yield block.numpy().data
