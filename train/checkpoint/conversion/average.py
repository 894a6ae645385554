"""`keepstep checkpoint average`: the mean of the weights of several checkpoints of a run, as a checkpoint of its own.

It has weights, recipe and tokenizer, and no optimizer state: moments of different steps have no meaningful mean. So
`export`, `eval` and `generate` read it, and a new run starts from its weights (`checkpoint import --from keepstep`).
The weights are read and written by rows: memory does not grow with the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from train.checkpoint.conversion.stored_tensors import StoredTensors, row_ranges
from train.checkpoint.format.attachments import Attachment
from train.checkpoint.format.dtypes import as_bytes
from train.checkpoint.format.manifest import BLOCK_BYTES, Manifest, Piece, by_tensor, encode, flat, shard_name
from train.checkpoint.format.verify import read_attachment
from train.checkpoint.importing.target import places
from train.checkpoint.save import written_now
from train.checkpoint.shard_writer import check_finite, write_blocks
from train.checkpoint.stores.open import open_root
from train.checkpoint.stores.protocol import Root
from train.errors import CheckpointError

WEIGHTS = "model."
"""Prefix of the names of weights."""


@dataclass(frozen=True)
class Averaged:
    """An average that was saved."""

    path: str
    steps: tuple[int, ...]
    shares: tuple[float, ...]
    """Share of each step's weights in the average. Their sum is 1."""


def shares_of(count: int, decay: float) -> tuple[float, ...]:
    """Shares of checkpoints, the newest last: each counts `decay` times the next newer one. 1 is the uniform mean."""
    raw = [decay**age for age in reversed(range(count))]
    return tuple(value / sum(raw) for value in raw)


def average(source: Root, steps: Sequence[int], decay: float, target: str) -> Averaged:
    """Save the average of the checkpoints of these steps to the run folder `target`, at the step of the newest.

    CheckpointError if one is missing, damaged or unlike the others, or if the target has checkpoints. Nothing is left
    then."""
    steps = tuple(sorted(steps))
    if missing := sorted(set(steps) - set(source.steps())):
        raise CheckpointError(f"there is no checkpoint of step {missing[0]}; `keepstep checkpoint ls` lists them")
    stored = [StoredTensors(source.folder(step)) for step in steps]
    _check_alike(stored)
    location = places(target)[0]
    root = open_root(location)
    if there := root.steps():
        raise CheckpointError(f"{location} has a checkpoint of step {there[-1]}; name the folder of a new run")
    shares = shares_of(len(steps), decay)
    _save(stored, shares, root, location)
    return Averaged(str(root.folder(steps[-1])), steps, shares)


def _check_alike(stored: Sequence[StoredTensors]) -> None:
    """CheckpointError unless all have weights of the same names, shapes, types and settings of the model."""
    newest = stored[-1]
    for other in stored[:-1]:
        ours, theirs = (flat(dict(one.manifest.identity.get("model") or {})) for one in (newest, other))
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise _unlike(other, newest, f"model.{name} is {theirs.get(name)!r} and {ours.get(name)!r}")
        for name in sorted(_weights(newest.manifest) ^ _weights(other.manifest)):
            raise _unlike(other, newest, f"only one of them has {name}")
        for name in _weights(newest.manifest):
            if (newest.shape(name), newest.dtype(name)) != (other.shape(name), other.dtype(name)):
                raise _unlike(other, newest, f"{name} has another shape or type")
    if not _weights(newest.manifest):
        raise CheckpointError(f"{newest.folder} has no weights ({WEIGHTS}*), so there is nothing to average")


def _unlike(one: StoredTensors, two: StoredTensors, difference: str) -> CheckpointError:
    return CheckpointError(f"{one.folder} and {two.folder} are not of one model: {difference}; name others")


def _weights(manifest: Manifest) -> set[str]:
    return {name for name in manifest.state_names if name.startswith(WEIGHTS)}


def _save(stored: Sequence[StoredTensors], shares: Sequence[float], root: Root, location: str) -> None:
    newest = stored[-1].manifest
    attempt = root.begin(newest.step)
    try:
        folder, prefix = root.attempt_folder(attempt), root.prefix(attempt)
        parts: list[tuple[Piece, Iterator[memoryview]]] = []
        for name in sorted(_weights(newest)):
            first = newest.pieces[name][0]
            piece = Piece(name, first.dtype, first.shape, (0,) * len(first.shape), first.shape)
            parts.append((piece, in_blocks(averaged_rows(stored, shares, name))))
        file, pieces = write_blocks(folder, prefix + shard_name(0), parts)
        attachments: list[Attachment] = []
        for old in newest.attachments:
            attachments.append(old.renamed(prefix))
            folder.write(attachments[-1].name, [read_attachment(stored[-1].folder, old)])
        facts = {"steps": [one.manifest.step for one in stored], "shares": list(shares)}
        manifest = replace(
            newest,
            validation_loss=None,
            extra={"averaged": facts},
            layout={},
            rank_states=[],
            files=[file],
            pieces=by_tensor(pieces),
            attachments=attachments,
            **written_now(),
        )
        root.commit(attempt, newest.step, encode(manifest))
    except BaseException:
        root.abandon(attempt)
        _remove_empty(location)
        raise


def averaged_rows(stored: Sequence[StoredTensors], shares: Sequence[float], name: str) -> Iterator[Tensor]:
    """The average of a tensor, some rows at a time. Sums are fp64, so equal tensors have themselves as the average."""
    shape = stored[0].shape(name)
    for low, high in row_ranges(shape):
        total = torch.zeros((high - low, *shape[1:]), dtype=torch.float64)
        for one, share in zip(stored, shares, strict=True):
            total.add_(one.rows(name, low, high).double(), alpha=share)
        rows = total.to(stored[0].dtype(name))
        check_finite(name, rows)
        yield rows


def in_blocks(parts: Iterator[Tensor]) -> Iterator[memoryview]:
    """The bytes of consecutive parts of a tensor, in blocks of BLOCK_BYTES, the last perhaps shorter."""
    waiting = bytearray()
    for part in parts:
        waiting += as_bytes(part)
        while len(waiting) >= BLOCK_BYTES:
            yield memoryview(bytes(waiting[:BLOCK_BYTES]))
            del waiting[:BLOCK_BYTES]
    if waiting:
        yield memoryview(bytes(waiting))


def _remove_empty(location: str) -> None:
    """Remove the folders that a failed attempt made, as far as they are empty."""
    if "://" in location:
        return
    for folder in (Path(location), Path(location).parent):
        try:
            folder.rmdir()
        except OSError:
            return
