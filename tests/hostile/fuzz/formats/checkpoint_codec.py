"""Trees of a checkpoint's manifest and shard, written again with all checksums that cover them."""

import json
import math
from typing import Any

import xxhash

from tests.hostile.fuzz.format import Files
from tests.hostile.fuzz.json_text import dumps

MANIFEST = "run/checkpoints/step-00000004/manifest.json"


def manifest_tree(data: bytes) -> Any:
    tree = json.loads(data)
    del tree["xxh3"]
    return tree


def signed(files: Files, name: str, tree: Any) -> dict[str, bytes]:
    """The manifest with its checksum as the last member."""
    body = dumps(tree)[:-1]
    return {name: body + f',\n"xxh3":"{xxhash.xxh3_64_hexdigest(body)}"}}\n'.encode()}


def header_tree(data: bytes) -> Any:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])


def with_header(files: Files, name: str, tree: Any) -> dict[str, bytes]:
    """The shard with another header, and the manifest with its checksum and with the pieces where they are now."""
    old = 8 + int.from_bytes(files[name][:8], "little")
    text = dumps(tree)
    text += b" " * (-(8 + len(text)) % 4096)
    header = len(text).to_bytes(8, "little") + text
    document = manifest_tree(files[MANIFEST])
    (file,) = document["files"]
    file |= {"header_bytes": len(header), "header_xxh3": xxhash.xxh3_64_hexdigest(header)}
    file["bytes"] += len(header) - old
    for tensor in document["tensors"].values():
        for piece in tensor["pieces"]:
            piece["start"] += len(header) - old
    return {name: header + files[name][old:], **signed(files, MANIFEST, document)}


def with_values(files: Files, name: str, data: bytes) -> dict[str, bytes]:
    """The shard with other bytes, and the manifest with the checksums of the pieces."""
    document = manifest_tree(files[MANIFEST])
    (file,) = document["files"]
    file["bytes"] = len(data)
    file["header_xxh3"] = xxhash.xxh3_64_hexdigest(data[: file["header_bytes"]])
    for tensor in document["tensors"].values():
        for piece in tensor["pieces"]:
            end = piece["start"] + 4 * math.prod(piece["sizes"])
            piece["xxh3"] = [xxhash.xxh3_64_hexdigest(data[piece["start"] : end])]
    return {name: data, **signed(files, MANIFEST, document)}


def with_attachment(files: Files, name: str, data: bytes) -> dict[str, bytes]:
    """The tokenizer's file, and the manifest with its size and checksum."""
    document = manifest_tree(files[MANIFEST])
    for attachment in document["attachments"]:
        if name.endswith(attachment["name"]):
            attachment |= {"bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}
    return {name: data, **signed(files, MANIFEST, document)}
