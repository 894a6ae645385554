"""Small files that a checkpoint carries besides its tensors, such as the tokenizer of its data set. No torch.

Names come from a manifest that anyone may have written, so `safe_name` checks each before it becomes a path.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.tokenizers.tokenizer import TOKENIZER_FILES
from data_pipeline.untrusted import PLAIN, read_file
from train.checkpoint.format.rules import checksum, count
from train.errors import CheckpointError

TOKENIZER = "tokenizer/"
"""Folder, within a checkpoint, of the files of the tokenizer."""

_NAME = re.compile(rf"(?:[0-9a-f]{{1,32}}/)?(?:{TOKENIZER})?{PLAIN}")
"""A plain name. Before it may stand `tokenizer/` and, in an object store, the name of the attempt."""


def safe_name(name: Any) -> str:
    """The name of a file relative to a checkpoint's folder. CheckpointError if it could leave the folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(
            f"the manifest names the file {str(name)[:200]!r}; a name has letters, digits, '.', '_' and '-', after "
            f"'{TOKENIZER}' at most; the checkpoint is not Keepstep's: do not use it"
        )
    return name


@dataclass(frozen=True)
class Attachment:
    """A file that a checkpoint carries. `name` is relative to the checkpoint's folder."""

    name: str
    bytes: int
    checksum: str
    """xxh3 of the whole file."""

    @property
    def plain_name(self) -> str:
        """The last part of the name."""
        return self.name.rsplit("/", 1)[-1]

    def renamed(self, prefix: str) -> "Attachment":
        """The same file under another attempt's prefix."""
        return Attachment(safe_name(f"{prefix}{TOKENIZER}{self.plain_name}"), self.bytes, self.checksum)


def attachment_of(name: str, content: bytes) -> Attachment:
    """The description of a file with this content. CheckpointError for a name that is not plain."""
    return Attachment(safe_name(name), len(content), xxhash.xxh3_64_hexdigest(content))


def plain_files(folder: Path) -> dict[str, bytes]:
    """The content of each file of the tokenizer in a folder, by name. Other files are left out."""
    return {name: read_file(folder / name) for name in sorted(TOKENIZER_FILES) if (folder / name).is_file()}


def encode_attachments(attachments: list[Attachment]) -> list[dict[str, Any]]:
    """Attachments as the manifest has them."""
    return [{"name": a.name, "bytes": a.bytes, "xxh3": a.checksum} for a in attachments]


def decode_attachments(listed: list[Mapping[str, Any]]) -> list[Attachment]:
    """The attachments that a manifest lists. CheckpointError for an unsafe name, or one that is not a tokenizer's.

    ValueError, KeyError or TypeError for entries of other types."""
    found = [Attachment(safe_name(entry["name"]), count(entry["bytes"]), checksum(entry["xxh3"])) for entry in listed]
    for attachment in found:
        if not attachment.name.endswith(TOKENIZER + attachment.plain_name):
            raise CheckpointError(
                f"the manifest lists the attachment {attachment.name!r}, which is no '{TOKENIZER}NAME'"
            )
    return found
