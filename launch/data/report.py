"""What a data set holds, for people and for programs."""

from dataclasses import asdict
from typing import Any

from data_pipeline.shards.manifest import Manifest, Split


def as_json(manifest: Manifest) -> dict[str, Any]:
    return {"fingerprint": manifest.fingerprint, **asdict(manifest)}


def as_text(address: str, manifest: Manifest) -> str:
    lines = [
        f"{address}",
        f"  fingerprint  {manifest.fingerprint}",
        f"  rows of      {manifest.row_tokens} tokens, uint{8 * manifest.token_bytes}, in blocks of "
        f"{manifest.block_rows} rows, compression {manifest.compression}",
        f"  tokenizer    {', '.join(manifest.tokenizer)}: {manifest.vocab_size} tokens, end of document "
        f"{manifest.end_of_document}",
    ]
    lines += [_split_line(name, split, manifest.row_tokens) for name, split in manifest.splits.items()]
    lines += ["  counts"] + [f"    {count:>14,}  {name}" for name, count in manifest.counts.items()]
    lines += ["  documents by length in tokens", *_histogram(manifest.lengths)]
    return "\n".join(lines)


def _split_line(name: str, split: Split, row_tokens: int) -> str:
    padding = 100 * split.padding / max(1, split.rows * row_tokens)
    size = sum(shard.bytes for shard in split.shards)
    return (
        f"  {name:<12} {split.rows:,} rows, {split.documents:,} documents ({split.documents_cut:,} in several rows), "
        f"{split.tokens:,} tokens, {padding:.3f} % padding, no token dropped, {len(split.shards)} shards, "
        f"{size / 2**20:,.1f} MiB"
    )


def _histogram(lengths: dict[str, int]) -> list[str]:
    most = max(lengths.values(), default=1)
    return [
        f"    up to {int(bound):>10,} {count:>12,} {'#' * -(-40 * count // most)}" for bound, count in lengths.items()
    ]
