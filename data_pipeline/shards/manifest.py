"""`manifest.json`: what a prepared data set holds. The hash of what decides the training rows is its fingerprint."""

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.errors import DataError
from data_pipeline.shards.shard_file import Compression, ShardShape
from data_pipeline.whole_file import write_whole

FORMAT = "keepstep-data"
VERSION = 1
NAME = "manifest.json"
FILES = "files.json"
"""Beside the manifest: the addresses of the input files, in the order of their numbers."""

TRAIN, VALIDATION = "train", "validation"
EARLIER_NAME = "held_out"
"""The name of the validation split in manifests that were written before it was renamed."""


@dataclass(frozen=True)
class Shard:
    file: str
    rows: int
    bytes: int
    xxh3: str
    """Of the shard's header and index, which holds the checksums of all blocks."""


@dataclass(frozen=True)
class Split:
    rows: int
    documents: int
    tokens: int
    """In use, ends of documents among them."""
    padding: int
    """Unused places in rows."""
    documents_cut: int
    """Documents that lie in more than one row."""
    shards: tuple[Shard, ...]
    """All but the last have the same number of rows, whole blocks of them."""
    groups: tuple[int, ...]
    """First row of each group of documents that was packed by itself."""


@dataclass(frozen=True)
class Manifest:
    row_tokens: int
    block_rows: int
    token_bytes: int
    compression: Compression
    vocab_size: int
    end_of_document: int
    tokenizer: dict[str, str]
    """File name in the folder `tokenizer` -> xxh3 of 128 bits."""
    splits: dict[str, Split]
    counts: dict[str, int] = field(default_factory=dict)
    """Documents read, and those dropped or mended, by reason."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Histogram: "up to N tokens" (a power of two) -> documents."""
    options: dict[str, Any] = field(default_factory=dict)
    plan: str = ""
    """Hash of inputs and options."""

    @cached_property
    def fingerprint(self) -> str:
        """Two data sets with equal fingerprints hold the same rows in the same order."""
        shards = {name: [(shard.rows, shard.xxh3) for shard in split.shards] for name, split in self.splits.items()}
        if VALIDATION in shards:  # hashed under its earlier name, so that fingerprints stay the same
            shards[EARLIER_NAME] = shards.pop(VALIDATION)
        shape = (self.row_tokens, self.block_rows, self.token_bytes, self.vocab_size, self.end_of_document)
        return xxhash.xxh3_128_hexdigest(json.dumps([shape, self.tokenizer, shards], sort_keys=True).encode())

    def shape(self, rows: int) -> ShardShape:
        return ShardShape(rows, self.row_tokens, self.block_rows, self.token_bytes, self.compression)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    content = {"format": FORMAT, "version": VERSION, "fingerprint": manifest.fingerprint, **asdict(manifest)}
    write_whole(folder / NAME, json.dumps(content, indent=1).encode())


def parse_manifest(data: bytes, address: str) -> Manifest:
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
            VALIDATION if name == EARLIER_NAME else name: _parse_split(split)
            for name, split in content["splits"].items()
        }
        manifest = Manifest(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{address}/{NAME} is no manifest of Keepstep ({error!r}); build the data set again") from None
    if manifest.fingerprint != fingerprint:
        raise DataError(
            f"{address}/{NAME} is damaged: it states the fingerprint {fingerprint}, but its content gives "
            f"{manifest.fingerprint}; restore it from a copy or build the data set again"
        )
    return manifest


def _parse_split(content: dict[str, Any]) -> Split:
    shards = tuple(Shard(**shard) for shard in content["shards"])
    return Split(**{**content, "shards": shards, "groups": tuple(content["groups"])})
