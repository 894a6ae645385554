"""The manifest of a checkpoint and the header of a shard, as they are on disk.

This file uses the standard library and xxhash only, no torch. `docs/checkpoint-format.md` describes the format for
readers in other languages.

A tensor is stored in pieces. A piece is a box of the tensor (`offsets`, `sizes`), row-major and little-endian, in a
safetensors file. The manifest records where each piece is, with an xxh3 checksum for every block of `BLOCK_BYTES`
bytes, so that a part of a piece can be read and still be verified. A checksum covers every byte of every file.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, cast

import xxhash

from train.checkpoint.format.attachments import Attachment, decode_attachments, encode_attachments, safe_name
from train.errors import CheckpointError
from train.old_names import replace_old_names

MANIFEST = "manifest.json"
FORMAT = "keepstep-checkpoint"
VERSION = 1
BLOCK_BYTES = 4 * 2**20
RNG_PREFIX = "rng."
"""Earlier versions also stored a random state per rank (`rng.00000`). Nothing restores it, so its name is hidden."""

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element, by safetensors' name of its type."""

_TRAILER_BYTES = len(',\n"xxh3":"0123456789abcdef"}\n')


class DamagedError(CheckpointError):
    """The bytes of a checkpoint are not those that were saved. The message names the file, the tensor and the fault."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor and where its bytes are stored."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str = ""
    start: int = 0
    """First byte, counted from the start of the file."""
    checksums: tuple[str, ...] = ()
    """xxh3 checksum of each block of BLOCK_BYTES bytes, in file order."""

    @property
    def bytes(self) -> int:
        """Size of the piece in bytes."""
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]

    @property
    def entry(self) -> str:
        """Name of the piece inside its safetensors file: the tensor's name, with ranges if it is only a part."""
        if self.sizes == self.shape:
            return self.tensor
        ranges = (f"{low}:{low + size}" for low, size in zip(self.offsets, self.sizes, strict=True))
        return f"{self.tensor}[{','.join(ranges)}]"


@dataclass(frozen=True)
class ShardFile:
    """A safetensors file of a checkpoint. `name` is relative to the checkpoint's folder."""

    name: str
    bytes: int
    header_bytes: int
    header_checksum: str


@dataclass(frozen=True)
class Manifest:
    """The description of one checkpoint: its facts, its files, and the pieces of its tensors."""

    step: int
    tokens: int
    validation_loss: float | None
    extra: dict[str, Any]
    """JSON that the training loop stores with its progress."""
    identity: dict[str, Any]
    """Facts that a run must share to resume from this checkpoint."""
    layout: dict[str, Any]
    """Engine, mesh and ranks of the run that saved. Informative: any layout can load any checkpoint."""
    rank_states: list[dict[str, Any]]
    """JSON of each rank of the run that saved, in rank order."""
    versions: dict[str, str]
    saved_at: str
    """Time in UTC, ISO 8601."""
    files: list[ShardFile]
    pieces: dict[str, list[Piece]] = field(repr=False)
    """Pieces of each stored tensor, by the tensor's name."""
    recipe: dict[str, Any] | None = field(default=None, repr=False)
    """The resolved recipe of the run that saved. None: an earlier version saved, or the recipe is not known."""
    attachments: list[Attachment] = field(default_factory=list[Attachment])
    """Other files: the tokenizer of the data set. Empty: an earlier version saved, or the fast tier."""

    @cached_property
    def state_names(self) -> set[str]:
        """Names of the tensors of the training state."""
        return {name for name in self.pieces if not name.startswith(RNG_PREFIX)}

    @cached_property
    def pieces_by_file(self) -> dict[str, list[Piece]]:
        """Pieces of each file, in the order in which the file stores them."""
        grouped: dict[str, list[Piece]] = {file.name: [] for file in self.files}
        for piece in sorted(chain.from_iterable(self.pieces.values()), key=lambda piece: piece.start):
            grouped[piece.file].append(piece)
        return grouped

    @property
    def file_bytes(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(file.bytes for file in self.files) + sum(attachment.bytes for attachment in self.attachments)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors together, without headers."""
        return sum(piece.bytes for piece in chain.from_iterable(self.pieces.values()))


def shard_name(rank: int) -> str:
    """The file name of the shard that a rank writes."""
    return f"shard-{rank:05d}.safetensors"


def checksum(data: Any) -> str:
    """xxh3 of bytes (64 bits, seed 0) as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def shard_header(pieces: Sequence[Piece]) -> bytes:
    """The first bytes of a safetensors file that stores these pieces one after the other."""
    entries: dict[str, Any] = {}
    at = 0
    for piece in pieces:
        entries[piece.entry] = {"dtype": piece.dtype, "shape": piece.sizes, "data_offsets": [at, at + piece.bytes]}
        at += piece.bytes
    assert len(entries) == len(pieces), "a shard has two pieces of one name"
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)  # tensor bytes start on a page, for direct reads and writes
    return len(text).to_bytes(8, "little") + text


_FACTS = (
    "step", "tokens", "validation_loss", "extra", "identity", "layout", "rank_states", "versions", "saved_at",
)  # fmt: skip


def encode(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`: JSON whose last member is the checksum of all bytes before it."""
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
    if manifest.recipe is not None:
        document["recipe"] = manifest.recipe
    if manifest.attachments:
        document["attachments"] = encode_attachments(manifest.attachments)
    document |= {"files": files, "tensors": tensors}
    body = json.dumps(document, separators=(",", ":"), allow_nan=False)[:-1].encode()
    return body + f',\n"xxh3":"{checksum(body)}"}}\n'.encode()


def decode(data: bytes) -> Manifest:
    """The manifest in these bytes. DamagedError if they fail their checksum.

    CheckpointError for an unknown version, or for the name of a file that is not plain."""
    body = data[:-_TRAILER_BYTES]
    if data[len(body) :] != f',\n"xxh3":"{checksum(body)}"}}\n'.encode():
        raise DamagedError(f"{MANIFEST}: the content does not match its checksum")
    document = json.loads(data)
    if document["format"] != FORMAT or document["version"] != VERSION or document["block_bytes"] != BLOCK_BYTES:
        raise CheckpointError(
            f"{MANIFEST}: format {document['format']} version {document['version']} with blocks of "
            f"{document['block_bytes']} bytes; this Keepstep reads version {VERSION} with {BLOCK_BYTES}: use the "
            f"Keepstep that wrote it ({document['versions'].get('keepstep', 'unknown')})"
        )
    if "held_out_loss" in document:  # an earlier name of the same field
        document["validation_loss"] = document.pop("held_out_loss")
    replace_old_names(document["identity"])
    recipe = document.get("recipe")
    if recipe is not None:
        replace_old_names(recipe)
    files = [
        ShardFile(safe_name(f["name"]), f["bytes"], f["header_bytes"], f["header_xxh3"]) for f in document["files"]
    ]
    pieces = {name: _decode_pieces(name, tensor, files) for name, tensor in document["tensors"].items()}
    return Manifest(
        **{name: document[name] for name in _FACTS},
        files=files,
        pieces=pieces,
        recipe=recipe,
        attachments=decode_attachments(document.get("attachments", [])),
    )


def _decode_pieces(name: str, tensor: Mapping[str, Any], files: Sequence[ShardFile]) -> list[Piece]:
    return [
        Piece(
            name,
            tensor["dtype"],
            tuple(tensor["shape"]),
            tuple(piece["offsets"]),
            tuple(piece["sizes"]),
            files[int(piece["file"])].name,
            piece["start"],
            tuple(piece["xxh3"]),
        )
        for piece in tensor["pieces"]
    ]


def by_tensor(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """Pieces grouped by tensor, sorted by name and offset: a manifest does not depend on the order of writing."""
    grouped: dict[str, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.tensor, piece.offsets)):
        grouped.setdefault(piece.tensor, []).append(piece)
    return grouped


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested facts, by dotted name."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves
