"""The options of a build: everything that decides its output, besides the inputs and the tokenizer."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from data_pipeline.build.packing import Packing
from data_pipeline.shards.shard_file import Compression
from data_pipeline.sources.records import ReadOptions


@dataclass(frozen=True)
class BuildOptions:
    """How documents are read, filtered, split, packed into rows, and stored."""

    seq_len: int = 1024
    """Tokens per row."""
    packing: Packing = "best-fit"
    compression: Compression = "none"
    """Compression of the blocks in the shards."""
    validation_share: float = 0.005
    """Share of the documents that goes to the validation split."""
    deduplicate: bool = False
    """Whether exact copies of documents are dropped."""
    read: ReadOptions = field(default_factory=ReadOptions)
    min_characters: int = 0
    """Shorter documents are dropped."""
    max_characters: int | None = None
    """Longer documents are dropped; None: no limit."""
    filters: tuple[str, ...] = ()
    """Filters of documents as `module:function`, see cleaning.py."""
    task_bytes: int | None = None
    """Input bytes per task: small files share a task, large ones are cut. None: chosen by the size of the input."""
    group_tokens: int = 1 << 28
    """Tokens, at least, of the documents that are packed together."""
    shard_bytes: int = 512 << 20
    """Largest size of a shard."""
    block_bytes: int = 256 << 10
    """Size in bytes of a block's tokens, at most, unless one row is larger."""

    def block_rows(self, token_bytes: int) -> int:
        """Rows per block, if a token takes `token_bytes`."""
        return max(1, self.block_bytes // (self.seq_len * token_bytes))

    def as_json(self) -> dict[str, Any]:
        """The options as JSON values."""
        return json.loads(json.dumps(asdict(self)))
