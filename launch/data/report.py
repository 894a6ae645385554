"""Prints the contents of a data set, for people and for programs."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from launch.terminal import duration, print_facts, print_json, print_table, size

if TYPE_CHECKING:
    from data_pipeline.shards.manifest import Manifest, Split

BAR_CHARACTERS = 40
"""Length of the longest bar in the histogram."""


def as_json(path: str, manifest: "Manifest") -> dict[str, Any]:
    """Return the manifest and its fingerprint as JSON values."""
    return {"path": path, "fingerprint": manifest.fingerprint, **asdict(manifest)}


def print_built(path: str, manifest: "Manifest", seconds: float, json: bool) -> None:
    """Print the contents of a data set that a command has built, and how long it took."""
    if json:
        print_json({**as_json(path, manifest), "seconds": seconds})
    else:
        print_dataset(path, manifest)
        print(f"\nbuilt in {duration(seconds)}")


def print_dataset(path: str, manifest: "Manifest") -> None:
    """Print the facts, splits, counts and lengths of a data set as tables."""
    print(path)
    print_facts(facts(manifest))
    print()
    columns = ["split", ">rows", ">documents", ">cut", ">tokens", ">padding", ">shards", ">size"]
    print_table(columns, [split_cells(name, split, manifest) for name, split in manifest.splits.items()])
    print()
    print_table(["count", ">number"], [[name, f"{count:,}"] for name, count in manifest.counts.items()])
    print()
    print_table([">tokens, up to", ">documents", ""], histogram(manifest.lengths))


def facts(manifest: "Manifest") -> list[tuple[str, str]]:
    """Return names and values for people."""
    tokenizer = ", ".join(manifest.tokenizer)
    return [
        ("fingerprint", manifest.fingerprint),
        ("row", f"{manifest.row_tokens:,} tokens, uint{8 * manifest.token_bytes}"),
        ("block", f"{manifest.block_rows:,} rows, compression {manifest.compression}"),
        ("tokenizer", f"{tokenizer}: {manifest.vocab_size:,} tokens, end of document {manifest.end_of_document}"),
    ]


def split_cells(name: str, split: "Split", manifest: "Manifest") -> list[str]:
    """Return one line of the table of splits."""
    padding = split.padding / max(1, split.rows * manifest.row_tokens)
    numbers = [split.rows, split.documents, split.documents_cut, split.tokens]
    shard_bytes = sum(shard.bytes for shard in split.shards)
    return [name, *(f"{number:,}" for number in numbers), f"{padding:.3%}", str(len(split.shards)), size(shard_bytes)]


def histogram(lengths: dict[str, int]) -> list[list[str]]:
    """Return the lines of the histogram of document lengths: bound, documents, bar."""
    most = max(lengths.values(), default=1)
    return [
        [f"{int(bound):,}", f"{count:,}", "#" * -(-BAR_CHARACTERS * count // most)] for bound, count in lengths.items()
    ]
