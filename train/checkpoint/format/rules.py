"""Rules that the manifest of a checkpoint keeps, whoever wrote it. No torch.

A checksum says that bytes are those that were written, not that who wrote them meant well. So every name, size and
offset is checked before it is used: the pieces of a tensor cover each of its elements once, and the pieces of a file
follow each other from its header to its end, so that a checksum covers every byte.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field

from data_pipeline.untrusted import METADATA_BYTES

if TYPE_CHECKING:
    from train.checkpoint.format.manifest import Manifest, Piece, ShardFile

MOST = 1 << 60
"""Largest number of bytes, elements, steps or tokens."""
MAX_DIMS = 16
"""Dimensions of a tensor, at most."""
MAX_NAME = 1024
"""Characters of a tensor's name, at most."""

_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_SHOWN = 200
_Count = Annotated[int, Field(ge=0, le=MOST)]
_Text = Annotated[str, Field(max_length=MAX_NAME, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


class _Facts(BaseModel):
    """The members of a manifest besides its files and tensors."""

    model_config = ConfigDict(strict=True)

    step: _Count
    tokens: _Count
    validation_loss: Annotated[float | None, Field(allow_inf_nan=False)]
    extra: dict[str, Any]
    identity: dict[str, Any]
    layout: dict[str, Any]
    rank_states: list[dict[str, Any]]
    versions: dict[str, _Text]
    saved_at: _Text
    recipe: dict[str, Any] | None = None


def check_facts(document: dict[str, Any]) -> None:
    """ValueError unless the members besides files and tensors have the types that readers expect.

    Messages repeat the names of the identity, so these must be printable."""
    facts = _Facts.model_validate(document)
    if odd := next((name for name in _names(facts.identity) if not name.isprintable()), None):
        raise ValueError(f"the identity has a member named {odd[:_SHOWN]!r}")


def _names(tree: Mapping[str, Any]) -> Iterator[str]:
    """The names of all members, of inner objects too. `parse_json` bounds the depth."""
    for name, value in tree.items():
        yield name
        if isinstance(value, Mapping):
            yield from _names(cast(Mapping[str, Any], value))


def count(value: Any) -> int:
    """The number. ValueError unless it is a whole number from 0 to MOST."""
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError(f"{str(value)[:_SHOWN]!r} is no whole number from 0 to {MOST}")
    return value


def counts(values: Any) -> tuple[int, ...]:
    """The list of numbers. ValueError unless it is short and each is a whole number from 0 to MOST."""
    if not isinstance(values, list) or len(numbers := cast(list[Any], values)) > MAX_DIMS:
        raise ValueError(f"{str(cast(object, values))[:_SHOWN]!r} is no list of at most {MAX_DIMS} numbers")
    if numbers and ({*map(type, numbers)} != {int} or min(numbers) < 0 or max(numbers) > MOST):  # fast: there are many
        raise ValueError(f"{str(numbers)[:_SHOWN]!r} has what is no whole number from 0 to {MOST}")
    return tuple(numbers)


def checksum(value: Any) -> str:
    """The checksum. ValueError unless it is an xxh3 of 16 hexadecimal digits."""
    if not isinstance(value, str) or not _CHECKSUM.fullmatch(value):
        raise ValueError(f"{str(value)[:_SHOWN]!r} is no checksum of 16 hexadecimal digits")
    return value


def problem_of(manifest: "Manifest", block_bytes: int) -> str | None:
    """What is wrong with a manifest whose members have the right types, or None."""
    return next(_problems(manifest, block_bytes), None)


def _problems(manifest: "Manifest", block_bytes: int) -> Iterator[str]:
    names = [*(file.name for file in manifest.files), *(attachment.name for attachment in manifest.attachments)]
    if len(set(names)) != len(names):
        yield "two files have the same name"
    for attachment in manifest.attachments:
        if attachment.bytes > METADATA_BYTES:
            yield f"{attachment.name} has {attachment.bytes:,} bytes, more than the {METADATA_BYTES:,} of an attachment"
    for name, pieces in manifest.pieces.items():
        for problem in _tensor_problems(name, pieces, block_bytes):
            yield f"the tensor {name[:_SHOWN]!r} {problem}"
    for file in manifest.files:
        yield from (f"{file.name} {problem}" for problem in _file_problems(file, manifest.pieces_by_file[file.name]))


def _tensor_problems(name: str, pieces: Sequence["Piece"], block_bytes: int) -> Iterator[str]:
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        yield f"has a name that is not printable or not 1 to {MAX_NAME} characters long"
    if not pieces:
        yield "has no pieces"
        return
    shape = pieces[0].shape
    if math.prod(shape) > MOST:
        yield f"has the shape {shape}, which is more than {MOST} elements"
        return
    for piece in pieces:
        if not len(piece.offsets) == len(piece.sizes) == len(shape):
            yield f"of shape {shape} has a piece at {piece.offsets} of sizes {piece.sizes}: not as many dimensions"
            return
        if any(o + s > whole or not s for o, s, whole in zip(piece.offsets, piece.sizes, shape, strict=True)):
            yield f"of shape {shape} has a piece at {piece.offsets} of sizes {piece.sizes}, which is empty or outside"
        blocks = -(-piece.bytes // block_bytes)
        if len(piece.checksums) != blocks:
            yield f"has a piece of {blocks} blocks with {len(piece.checksums)} checksums"
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape) or _overlap(pieces):
        yield f"of shape {shape} has pieces that do not cover each of its elements exactly once"


def _overlap(pieces: Sequence["Piece"]) -> bool:
    """Whether two boxes have an element in common.

    They are passed in the order of the dimension that is cut most, and compared with those that have not ended."""
    if len(pieces) == 1 or not pieces[0].shape:
        return len(pieces) > 1
    dims = range(len(pieces[0].shape))
    along = max(dims, key=lambda dim: len({piece.offsets[dim] for piece in pieces}))
    begun: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets[along]):
        begun = [other for other in begun if other.offsets[along] + other.sizes[along] > piece.offsets[along]]
        if any(all(_meet(piece, other, dim) for dim in dims) for other in begun):
            return True
        begun.append(piece)
    return False


def _meet(one: "Piece", two: "Piece", dim: int) -> bool:
    """Whether the ranges of two boxes along a dimension have an index in common."""
    low, high = one.offsets[dim], one.offsets[dim] + one.sizes[dim]
    return two.offsets[dim] < high and low < two.offsets[dim] + two.sizes[dim]


def _file_problems(file: "ShardFile", pieces: Sequence["Piece"]) -> Iterator[str]:
    if not 8 <= file.header_bytes <= min(file.bytes, METADATA_BYTES):
        yield f"has a header of {file.header_bytes} bytes in a file of {file.bytes}"
    end = file.header_bytes
    for piece in pieces:
        if piece.start != end:
            yield f"has a piece of {piece.tensor[:_SHOWN]!r} at byte {piece.start}, where byte {end} was to follow"
            return
        end += piece.bytes
    if end != file.bytes:
        yield f"has {file.bytes} bytes, but its header and pieces have {end}"
