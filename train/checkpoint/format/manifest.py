"""What a checkpoint is on disk: the manifest and the header of a shard. Standard library and xxhash alone, no torch.

`docs/checkpoint-format.md` says the same for readers in other languages.

A tensor is stored in pieces, each a box of it (`offsets`, `sizes`), row-major and little-endian, in a safetensors file.
The manifest knows where every piece lies and has an xxh3 of every block of `BLOCK_BYTES` of it, so a part of a piece
can be read and still be checked. Every byte of every file is under some checksum.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import xxhash

from train.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "keepstep-checkpoint"
VERSION = 1
BLOCK_BYTES = 4 * 2**20
RNG_PREFIX = "rng."
"""Names of the ranks' random states (`rng.00000`), UTF-8 JSON stored as U8. Not part of the training state."""

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element by safetensors' name of its type."""

_TRAILER = len(',\n"xxh3":"0123456789abcdef"}\n')


class DamagedError(CheckpointError):
    """A checkpoint does not hold what was written: the file, the tensor and why."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor and where its bytes are."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str = ""
    start: int = 0
    """First byte, counted from the start of the file."""
    checksums: tuple[str, ...] = ()
    """Of each block of BLOCK_BYTES."""

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]

    @property
    def entry(self) -> str:
        """Its name inside the safetensors file."""
        if self.sizes == self.shape:
            return self.tensor
        ranges = (f"{low}:{low + size}" for low, size in zip(self.offsets, self.sizes, strict=True))
        return f"{self.tensor}[{','.join(ranges)}]"


@dataclass(frozen=True)
class ShardFile:
    name: str
    bytes: int
    header_bytes: int
    header_checksum: str


@dataclass(frozen=True)
class Manifest:
    step: int
    tokens: int
    validation_loss: float | None
    extra: dict[str, Any]
    identity: dict[str, Any]
    """What must be the same to go on from here."""
    layout: dict[str, Any]
    """How the run that saved was spread over ranks; its random states fit this layout alone."""
    rank_states: list[dict[str, Any]]
    versions: dict[str, str]
    saved_at: str
    files: list[ShardFile]
    pieces: dict[str, list[Piece]] = field(repr=False)
    """By tensor; the training state and the random states."""

    @cached_property
    def state_names(self) -> set[str]:
        return {name for name in self.pieces if not name.startswith(RNG_PREFIX)}

    @cached_property
    def pieces_by_file(self) -> dict[str, list[Piece]]:
        """In the order in which they lie there."""
        grouped: dict[str, list[Piece]] = {file.name: [] for file in self.files}
        for piece in sorted(chain.from_iterable(self.pieces.values()), key=lambda piece: piece.start):
            grouped[piece.file].append(piece)
        return grouped

    @property
    def tensor_bytes(self) -> int:
        return sum(piece.bytes for piece in chain.from_iterable(self.pieces.values()))


def checksum(data: Any) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def shard_header(pieces: Sequence[Piece]) -> bytes:
    """The start of a safetensors file that holds these pieces one after the other."""
    entries, at = {}, 0
    for piece in pieces:
        entries[piece.entry] = {"dtype": piece.dtype, "shape": piece.sizes, "data_offsets": [at, at + piece.bytes]}
        at += piece.bytes
    assert len(entries) == len(pieces), "two pieces of one name in a shard"
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)  # data start on a page, for direct reads and writes
    return len(text).to_bytes(8, "little") + text


def encode(manifest: Manifest) -> bytes:
    numbers = {file.name: number for number, file in enumerate(manifest.files)}
    tensors = {
        name: {
            "dtype": pieces[0].dtype,
            "shape": pieces[0].shape,
            "pieces": [
                {
                    "offsets": piece.offsets,
                    "sizes": piece.sizes,
                    "file": numbers[piece.file],
                    "start": piece.start,
                    "xxh3": piece.checksums,
                }
                for piece in pieces
            ],
        }
        for name, pieces in manifest.pieces.items()
    }
    files = [
        {"name": f.name, "bytes": f.bytes, "header_bytes": f.header_bytes, "header_xxh3": f.header_checksum}
        for f in manifest.files
    ]
    facts = {name: getattr(manifest, name) for name in _FACTS}
    document = {"format": FORMAT, "version": VERSION, "block_bytes": BLOCK_BYTES} | facts
    document |= {"files": files, "tensors": tensors}
    body = json.dumps(document, separators=(",", ":"), allow_nan=False)[:-1].encode()
    return body + f',\n"xxh3":"{checksum(body)}"}}\n'.encode()


_FACTS = (
    "step", "tokens", "validation_loss", "extra", "identity", "layout", "rank_states", "versions", "saved_at",
)  # fmt: skip


def decode(data: bytes) -> Manifest:
    """DamagedError if the bytes are not those that were written; CheckpointError if the version is unknown."""
    body = data[:-_TRAILER]
    if data[len(body) :] != f',\n"xxh3":"{checksum(body)}"}}\n'.encode():
        raise DamagedError(f"{MANIFEST}: its checksum does not fit its content")
    document = json.loads(data)
    if "held_out_loss" in document:  # written before the field was renamed
        document["validation_loss"] = document.pop("held_out_loss")
    if document["format"] != FORMAT or document["version"] != VERSION or document["block_bytes"] != BLOCK_BYTES:
        raise CheckpointError(
            f"{MANIFEST}: format {document['format']} version {document['version']} with blocks of "
            f"{document['block_bytes']} bytes; this Keepstep reads version {VERSION} with {BLOCK_BYTES}: use the "
            f"Keepstep that wrote it ({document['versions'].get('keepstep', 'unknown')})"
        )
    files = [ShardFile(f["name"], f["bytes"], f["header_bytes"], f["header_xxh3"]) for f in document["files"]]
    pieces = {
        name: [
            Piece(
                name,
                tensor["dtype"],
                tuple(tensor["shape"]),
                tuple(p["offsets"]),
                tuple(p["sizes"]),
                files[p["file"]].name,
                p["start"],
                tuple(p["xxh3"]),
            )
            for p in tensor["pieces"]
        ]
        for name, tensor in document["tensors"].items()
    }
    return Manifest(**{name: document[name] for name in _FACTS}, files=files, pieces=pieces)


def by_tensor(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """Sorted by name and offset, so that a manifest does not depend on who wrote what first."""
    grouped: dict[str, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.tensor, piece.offsets)):
        grouped.setdefault(piece.tensor, []).append(piece)
    return grouped


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested facts with dotted names."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves
