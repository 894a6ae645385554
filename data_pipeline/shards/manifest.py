"""`manifest.json`: the description of a prepared data set. Its fingerprint is a hash of what decides the rows.

`manifest_file.py` writes and reads the file. `manifest_rules.py` has the rules that every manifest keeps.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import xxhash
from pydantic import ConfigDict, Field

from data_pipeline.shards.shard_file import Compression, ShardShape

NAME = "manifest.json"
FILES = "files.json"
"""File beside the manifest: the addresses of the input files, in the order of their numbers."""

TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)
EARLIER_VALIDATION = "held_out"
"""Name of the validation split in manifests that were written before it was renamed."""

Count = Annotated[int, Field(ge=0, lt=1 << 60)]
"""A number of things."""
Checksum = Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")]
"""64-bit xxh3 in hexadecimal digits; empty where an earlier version stored none."""
_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True)
class Shard:
    """One file of rows."""

    __pydantic_config__ = _STRICT

    file: str
    """Path in the data set's folder."""
    rows: Count
    bytes: Count
    xxh3: Checksum
    """xxh3 checksum of the shard's header and index. The index has the checksums of all blocks."""


@dataclass(frozen=True)
class Split:
    """The rows of one split."""

    __pydantic_config__ = _STRICT

    rows: Count
    documents: Count
    tokens: Count
    """Tokens in use, end-of-document tokens included."""
    padding: Count
    """Unused tokens at the ends of rows."""
    documents_cut: Count
    """Documents that are in more than one row."""
    shards: tuple[Shard, ...]
    """Shards in the order of the rows. All but the last have the same number of rows, in whole blocks."""
    groups: tuple[Count, ...]
    """First row of each group of documents that was packed separately."""


@dataclass(frozen=True)
class Manifest:
    """The description of a data set."""

    __pydantic_config__ = _STRICT

    row_tokens: Count
    """Tokens per row."""
    block_rows: Count
    """Rows per block."""
    token_bytes: Count
    """Bytes per token: 2 or 4."""
    compression: Compression
    vocab_size: Count
    end_of_document: Count
    """Id of the token after each document."""
    tokenizer: dict[str, str]
    """File name in the folder `tokenizer` -> 128-bit xxh3 checksum."""
    splits: dict[str, Split]
    """Split name -> rows."""
    counts: dict[str, Count] = field(default_factory=dict)
    """Documents and bytes read, and documents dropped or repaired, by reason."""
    lengths: dict[str, Count] = field(default_factory=dict)
    """Histogram: "up to N tokens" (a power of two) -> documents."""
    options: dict[str, Any] = field(default_factory=dict)
    """The options of the build."""
    plan: str = ""
    """Hash of the inputs and options of the build."""
    hashes: dict[str, Count] = field(default_factory=dict)
    """Split -> number of different documents, whose hashes are stored. Empty in data sets of earlier versions."""
    validation_below: int | None = None
    """Documents whose hash is below this number are in the validation split. None: the split has its own files."""
    files_xxh3: Checksum = ""
    """xxh3 checksum of `files.json`. Empty in data sets of earlier versions."""

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
