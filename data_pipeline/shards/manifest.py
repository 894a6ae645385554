"""`manifest.json`: the description of a prepared data set. Its fingerprint is a hash of what decides the rows."""

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.atomic_file import write_atomic
from data_pipeline.errors import DataError
from data_pipeline.shards.shard_file import Compression, ShardShape

FORMAT = "keepstep-data"
VERSION = 1
NAME = "manifest.json"
FILES = "files.json"
"""File beside the manifest: the addresses of the input files, in the order of their numbers."""

TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)
EARLIER_VALIDATION = "held_out"
"""Name of the validation split in manifests that were written before it was renamed."""


@dataclass(frozen=True)
class Shard:
    """One file of rows."""

    file: str
    """Path in the data set's folder."""
    rows: int
    bytes: int
    xxh3: str
    """xxh3 checksum of the shard's header and index. The index has the checksums of all blocks."""


@dataclass(frozen=True)
class Split:
    """The rows of one split."""

    rows: int
    documents: int
    tokens: int
    """Tokens in use, end-of-document tokens included."""
    padding: int
    """Unused tokens at the ends of rows."""
    documents_cut: int
    """Documents that are in more than one row."""
    shards: tuple[Shard, ...]
    """Shards in the order of the rows. All but the last have the same number of rows, in whole blocks."""
    groups: tuple[int, ...]
    """First row of each group of documents that was packed separately."""


@dataclass(frozen=True)
class Manifest:
    """The description of a data set."""

    row_tokens: int
    """Tokens per row."""
    block_rows: int
    """Rows per block."""
    token_bytes: int
    """Bytes per token: 2 or 4."""
    compression: Compression
    vocab_size: int
    end_of_document: int
    """Id of the token after each document."""
    tokenizer: dict[str, str]
    """File name in the folder `tokenizer` -> 128-bit xxh3 checksum."""
    splits: dict[str, Split]
    """Split name -> rows."""
    counts: dict[str, int] = field(default_factory=dict)
    """Documents and bytes read, and documents dropped or repaired, by reason."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Histogram: "up to N tokens" (a power of two) -> documents."""
    options: dict[str, Any] = field(default_factory=dict)
    """The options of the build."""
    plan: str = ""
    """Hash of the inputs and options of the build."""
    hashes: dict[str, int] = field(default_factory=dict)
    """Split -> number of different documents, whose hashes are stored. Empty in data sets of earlier versions."""
    validation_below: int | None = None
    """Documents whose hash is below this number are in the validation split. None: the split has its own files."""

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the rows. Data sets with equal fingerprints have the same rows in the same order."""
        shards = {name: [(shard.rows, shard.xxh3) for shard in split.shards] for name, split in self.splits.items()}
        if VALIDATION in shards:  # hashed under its earlier name, so that fingerprints stay the same
            shards[EARLIER_VALIDATION] = shards.pop(VALIDATION)
        shape = (self.row_tokens, self.block_rows, self.token_bytes, self.vocab_size, self.end_of_document)
        return xxhash.xxh3_128_hexdigest(json.dumps([shape, self.tokenizer, shards], sort_keys=True).encode())

    def shape(self, rows: int) -> ShardShape:
        """The layout of a shard of so many rows."""
        return ShardShape(rows, self.row_tokens, self.block_rows, self.token_bytes, self.compression)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` in the folder."""
    content = {"format": FORMAT, "version": VERSION, "fingerprint": manifest.fingerprint, **asdict(manifest)}
    write_atomic(folder / NAME, json.dumps(content, indent=1).encode())


def parse_manifest(data: bytes, address: str) -> Manifest:
    """The manifest in these bytes. DataError if they are not a manifest of this version, or were changed."""
    try:
        content = json.loads(data)
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise DataError(
                f"{address}/{NAME} has format {content['format']} version {content['version']}; this Keepstep reads "
                f"{FORMAT} version {VERSION}: build the data set again"
            )
        fingerprint = content["fingerprint"]
        for key in ("format", "version", "fingerprint"):
            del content[key]
        content["splits"] = {
            VALIDATION if name == EARLIER_VALIDATION else name: _parse_split(split)
            for name, split in content["splits"].items()
        }
        manifest = Manifest(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{address}/{NAME} is not a Keepstep manifest ({error!r}); build the data set again") from None
    if manifest.fingerprint != fingerprint:
        raise DataError(
            f"{address}/{NAME} is damaged: it states the fingerprint {fingerprint}, but its content has "
            f"{manifest.fingerprint}; restore it from a copy or build the data set again"
        )
    return manifest


def _parse_split(content: dict[str, Any]) -> Split:
    shards = tuple(Shard(**shard) for shard in content["shards"])
    return Split(**{**content, "shards": shards, "groups": tuple(content["groups"])})
