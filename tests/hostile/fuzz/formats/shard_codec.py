"""Trees of a data set's manifest and of the parts of its shards, written again with all checksums that cover them."""

import contextlib
import json
import struct
from typing import Any

import numpy as np
import xxhash

from tests.hostile.fuzz.format import Files
from tests.hostile.fuzz.json_text import dumps

MANIFEST = "set/manifest.json"


def signed(files: Files, name: str, tree: Any) -> dict[str, bytes]:
    """The manifest with its fingerprint and checksum, as far as the tree has what they are computed from."""
    if not isinstance(tree, dict):
        return {name: dumps(tree)}
    with contextlib.suppress(Exception):
        tree = {**tree, "fingerprint": _fingerprint(json.loads(dumps(tree)))}
    with contextlib.suppress(Exception):
        content = {key: value for key, value in json.loads(dumps(tree)).items() if key != "xxh3"}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        tree = {**tree, "xxh3": xxhash.xxh3_64_hexdigest(canonical.encode())} if "xxh3" in tree else tree
    return {name: dumps(tree)}


def _fingerprint(tree: dict[str, Any]) -> str:
    """The fingerprint that docs/data-format.md defines."""
    splits = tree["splits"].items()
    shards = {name: [(shard["rows"], shard["xxh3"]) for shard in split["shards"]] for name, split in splits}
    shards["held_out"] = shards.pop("validation")
    shape = [tree[key] for key in ("row_tokens", "block_rows", "token_bytes", "vocab_size", "end_of_document")]
    return xxhash.xxh3_128_hexdigest(json.dumps([shape, tree["tokenizer"], shards], sort_keys=True).encode())


def with_files(files: Files, name: str, tree: Any) -> dict[str, bytes]:
    """The addresses of the inputs, and the manifest with their checksum."""
    data, manifest = dumps(tree), json.loads(files[MANIFEST])
    manifest["files_xxh3"] = xxhash.xxh3_64_hexdigest(data)
    return {name: data, **signed(files, MANIFEST, manifest)}


def header_tree(data: bytes) -> dict[str, Any]:
    magic, *numbers = struct.unpack("<8sIIIIIQ28x", data[:64])
    names = ("version", "token_bytes", "row_tokens", "block_rows", "compressed", "rows")
    return {"magic": magic.decode(), **dict(zip(names, numbers, strict=True))}


def with_header(files: Files, name: str, tree: Any) -> dict[str, bytes]:
    values = [int(v) if _is_number(v) else 0 for v in tree.values()][1:7] if isinstance(tree, dict) else []
    values = [*values, 0, 0, 0, 0, 0, 0][:6]
    limits = [2**32] * 5 + [2**64]
    values = [value % limit for value, limit in zip(values, limits, strict=True)]
    header = struct.pack("<8sIIIIIQ28x", b"KEEPSTEP", *values)
    return _resigned(files, name, header + files[name][64:])


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value == value and abs(value) < 2**70)


def index_tree(data: bytes) -> dict[str, list[int]]:
    """The four arrays of the index of a shard."""
    rows, block_rows = struct.unpack("<8sIIIIIQ28x", data[:64])[6], struct.unpack("<8sIIIIIQ28x", data[:64])[4]
    blocks = -(-rows // block_rows)
    numbers = np.frombuffer(data[-(4 * blocks + 2) * 8 :], "<u8").tolist()
    ends = [0, blocks + 1, 2 * blocks + 1, 3 * blocks + 2, 4 * blocks + 2]
    names = ("data_offsets", "data_sums", "origin_offsets", "origin_sums")
    return {name: numbers[a:b] for name, a, b in zip(names, ends, ends[1:], strict=False)}


def with_index(files: Files, name: str, tree: Any) -> dict[str, bytes]:
    flat: list[int] = []
    lists = list(tree.values()) if isinstance(tree, dict) else [tree]
    for item in (value for items in lists for value in (items if isinstance(items, list) else [items])):
        flat.append(int(item) % 2**64 if _is_number(item) else 0)
    old = index_tree(files[name])
    length = sum(map(len, old.values()))
    return _resigned(files, name, files[name][: -8 * length] + np.array(flat[: 2 * length], "<u8").tobytes())


def blocks(data: bytes) -> bytes:
    """Everything between the header and the index."""
    return data[64 : -8 * sum(map(len, index_tree(data).values()))]


def with_blocks(files: Files, name: str, data: bytes) -> dict[str, bytes]:
    """The shard with other blocks, whose checksums in the index are those of the bytes."""
    index, whole = index_tree(files[name]), files[name][:64] + data
    for offsets, sums in (("data_offsets", "data_sums"), ("origin_offsets", "origin_sums")):
        pairs = zip(index[offsets], index[offsets][1:], strict=False)
        index[sums] = [xxhash.xxh3_64_intdigest(whole[low:high]) for low, high in pairs]
    numbers = [number for part in index.values() for number in part]
    return _resigned(files, name, whole + np.array(numbers, "<u8").tobytes())


def _resigned(files: Files, name: str, data: bytes) -> dict[str, bytes]:
    """The shard, and the manifest with its size and checksum."""
    tree = json.loads(files[MANIFEST])
    length = sum(map(len, index_tree(files[name]).values())) * 8
    for split in tree["splits"].values():
        for shard in split["shards"]:
            if name.endswith(shard["file"]):
                shard |= {"bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data[:64] + data[-length:])}
    return {name: data, **signed(files, MANIFEST, tree)}


def with_tokenizer(files: Files, name: str, data: bytes) -> dict[str, bytes]:
    """The tokenizer's file, and the manifest with its checksum."""
    tree = json.loads(files[MANIFEST])
    tree["tokenizer"][name.rpartition("/")[2]] = xxhash.xxh3_128_hexdigest(data)
    return {name: data, **signed(files, MANIFEST, tree)}
