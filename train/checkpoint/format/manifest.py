"""The manifest of a checkpoint and the header of a shard, as they are on disk.

This file uses no torch. `docs/checkpoint-format.md` describes the format for readers in other languages.

A tensor is stored in pieces. A piece is a box of the tensor (`offsets`, `sizes`), row-major and little-endian, in a
safetensors file. The manifest records where each piece is, with an xxh3 checksum for every block of `BLOCK_BYTES`
bytes, so that a part of a piece can be read and still be verified. A checksum covers every byte of every file.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, cast

import xxhash
from pydantic import ValidationError

from data_pipeline.untrusted import METADATA_BYTES, parse_json
from train.checkpoint.format import rules
from train.checkpoint.format.attachments import Attachment, decode_attachments, encode_attachments, safe_name
from train.errors import CheckpointError, ConfigError
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

_PAUSE_SECONDS = 1e-4
"""Pause between two shards while a manifest is joined: the shortest in which another thread is sure to run."""
_SHOWN = 200
"""Characters of a foreign text that a message quotes."""
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


@dataclass(frozen=True)
class Description:
    """One shard's part of the manifest, as JSON. Each rank encodes its own, so that rank 0 only joins bytes."""

    file: ShardFile
    tensors: bytes
    """One line for each tensor of the shard: its name, type and shape, up to its first piece."""
    pieces: bytes
    """For each of these tensors a line with its pieces in the shard."""
    tensor_bytes: int
    """Bytes of the shard's tensors, without the header."""


def describe(file: ShardFile, number: int, pieces: Iterable[Piece]) -> Description:
    """The description of a shard. `number`: its place among the manifest's files."""
    heads: list[str] = []
    rows: list[str] = []
    tensor_bytes = 0
    for name, of_tensor in by_tensor(pieces).items():
        first = of_tensor[0]
        heads.append(f'{_json(name)}:{{"dtype":{_json(first.dtype)},"shape":{_json(first.shape)},"pieces":[')
        rows.append(",".join(_encode_piece(piece, number) for piece in of_tensor))
        tensor_bytes += sum(piece.bytes for piece in of_tensor)
    return Description(file, "\n".join(heads).encode(), "\n".join(rows).encode(), tensor_bytes)


def _encode_piece(piece: Piece, number: int) -> str:
    places = {"offsets": piece.offsets, "sizes": piece.sizes, "file": number, "start": piece.start}
    return _json(places | {"xxh3": piece.checksums})


def encode(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`: JSON whose last member is the checksum of all bytes before it."""
    by_file: dict[str, list[Piece]] = {file.name: [] for file in manifest.files}
    for piece in chain.from_iterable(manifest.pieces.values()):
        by_file[piece.file].append(piece)
    return bytes(
        join(manifest, [describe(file, number, by_file[file.name]) for number, file in enumerate(manifest.files)])
    )


def join(facts: Manifest, shards: Sequence[Description]) -> bytearray:
    """The bytes of `manifest.json` from its facts and the descriptions of its shards, in the order of its files.

    Rank 0 does this beside training. Each step of the work is short, and it pauses between steps, so that it never
    holds Python's lock for long, however many ranks there are. CheckpointError if it is too large to be read."""
    rows_by_tensor: dict[bytes, list[bytes]] = {}
    for shard in shards:
        tensors = shard.tensors.split(b"\n") if shard.tensors else []
        for tensor, rows in zip(tensors, shard.pieces.split(b"\n") if tensors else [], strict=True):
            rows_by_tensor.setdefault(tensor, []).append(rows)
        time.sleep(_PAUSE_SECONDS)
    body = bytearray(_head(facts, shards))  # it grows by small parts, for the same reason
    for number, tensor in enumerate(sorted(rows_by_tensor)):
        for part in (b"," if number else b"", tensor, b",".join(rows_by_tensor[tensor]), b"]}"):
            body += part
    body += b"}"
    body += f',\n"xxh3":"{checksum(body)}"}}\n'.encode()
    if len(body) > METADATA_BYTES:  # no one could read the checkpoint
        raise CheckpointError(
            f"{MANIFEST} would have {len(body):,} bytes for the pieces of {len(shards)} ranks, and at most "
            f"{METADATA_BYTES:,} are read; shard over fewer ranks (set parallel.replicate above 1)"
        )
    return body


def _head(facts: Manifest, shards: Sequence[Description]) -> bytes:
    """The manifest up to its first tensor."""
    members = {"format": FORMAT, "version": VERSION, "block_bytes": BLOCK_BYTES}
    texts = [f'"{name}":{_json(value)}' for name, value in members.items()]
    texts += [
        f'"{name}":{_json_list(value) if name == "rank_states" else _json(value)}' for name, value in _facts(facts)
    ]
    files = [
        {"name": f.name, "bytes": f.bytes, "header_bytes": f.header_bytes, "header_xxh3": f.header_checksum}
        for f in (shard.file for shard in shards)
    ]
    return f'{{{",".join(texts)},"files":{_json_list(files)},"tensors":{{'.encode()


def _facts(manifest: Manifest) -> Iterator[tuple[str, Any]]:
    yield from ((name, getattr(manifest, name)) for name in _FACTS)
    if manifest.recipe is not None:
        yield "recipe", manifest.recipe
    if manifest.attachments:
        yield "attachments", encode_attachments(manifest.attachments)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _json_list(values: Iterable[Any]) -> str:
    """JSON of a list that may be long: encoding it in one call would hold Python's lock for as long as that takes."""
    return f"[{','.join(map(_json, values))}]"


def decode(data: bytes) -> Manifest:
    """The manifest in these bytes. CheckpointError for an unknown version.

    DamagedError if they fail their checksum, or if what they state is not possible (`rules.py`)."""
    body = memoryview(data)[: max(0, len(data) - _TRAILER_BYTES)]
    if data[len(body) :] != f',\n"xxh3":"{checksum(body)}"}}\n'.encode():
        raise DamagedError(f"{MANIFEST}: the content does not match its checksum")
    try:
        document = parse_json(data)
        _check_version(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST}: it is not the manifest of a checkpoint: {str(error)[:_SHOWN]}") from None
    try:
        manifest = _decode(document)
        problem = rules.problem_of(manifest, BLOCK_BYTES)
        if problem is None:
            return manifest
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(str(part)[:100] for part in first['loc'])!r}: {first['msg']}"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, ConfigError, CheckpointError) as error:
        problem = f"{'a member is missing: ' if isinstance(error, KeyError) else ''}{str(error)[:_SHOWN]}"
    raise DamagedError(f"{MANIFEST}: {problem}; Keepstep did not save this checkpoint so: do not use it")


def _check_version(document: dict[str, Any]) -> None:
    found = tuple(document[name] for name in ("format", "version", "block_bytes"))
    if found != (FORMAT, VERSION, BLOCK_BYTES) or not all(type(number) is int for number in found[1:]):
        writer = document.get("versions")
        name, version, block_bytes = map(_shown, found)
        raise CheckpointError(
            f"{MANIFEST}: format {name}, version {version} with blocks of {block_bytes} bytes; "
            f"this Keepstep reads version {VERSION} with {BLOCK_BYTES}: use the Keepstep that wrote it "
            f"({_shown(cast(dict[str, Any], writer).get('keepstep') if isinstance(writer, dict) else None)})"
        )


def _shown(value: Any) -> str:
    return str(value)[:_SHOWN] if isinstance(value, int | None) else repr(value)[:_SHOWN]


def _decode(document: dict[str, Any]) -> Manifest:
    """The manifest of a JSON document of this version. Many errors if members are missing or have other types."""
    if "held_out_loss" in document:  # an earlier name of the same field
        document["validation_loss"] = document.pop("held_out_loss")
    rules.check_facts(document)
    replace_old_names(document["identity"])
    recipe = document.get("recipe")
    if recipe is not None:
        replace_old_names(recipe)
    files = [_decode_file(entry) for entry in document["files"]]
    pieces = {name: _decode_pieces(name, tensor, files) for name, tensor in document["tensors"].items()}
    return Manifest(
        **{name: document[name] for name in _FACTS},
        files=files,
        pieces=pieces,
        recipe=recipe,
        attachments=decode_attachments(document.get("attachments", [])),
    )


def _decode_file(entry: Mapping[str, Any]) -> ShardFile:
    sizes = rules.count(entry["bytes"]), rules.count(entry["header_bytes"])
    return ShardFile(safe_name(entry["name"]), *sizes, rules.checksum(entry["header_xxh3"]))


def _decode_pieces(name: str, tensor: Mapping[str, Any], files: Sequence[ShardFile]) -> list[Piece]:
    dtype, shape = tensor["dtype"], rules.counts(tensor["shape"])
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{_shown(dtype)} is no type of elements")
    return [
        Piece(
            name,
            dtype,
            shape,
            rules.counts(piece["offsets"]),
            rules.counts(piece["sizes"]),
            files[rules.count(piece["file"])].name,
            rules.count(piece["start"]),
            tuple(map(rules.checksum, piece["xxh3"])),
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
