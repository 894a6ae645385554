"""The result of a finished part of a build: JSON with checksums of itself and of the files that the work wrote.

A build that continues uses a result only if every byte of it is as it was written. Otherwise it does the work again.
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.atomic_file import write_atomic
from data_pipeline.untrusted import open_file, parse_json, read_file

log = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20


def write_result(path: Path, result: dict[str, Any], files: Sequence[Path]) -> None:
    """Writes the result to `path`. `files`: what the work wrote, complete by now."""
    checksums = [[file.stat().st_size, _checksum_of_file(file)] for file in files]
    content = {"result": result, "files": checksums}
    write_atomic(path, json.dumps({**content, "xxh3": _checksum(content)}).encode())


def read_result(path: Path, files: Sequence[Path]) -> dict[str, Any] | None:
    """The result at `path`; None if there is none, or if it or one of the files is not as it was written."""
    if not os.path.lexists(path):
        return None
    try:
        content: dict[str, Any] = parse_json(read_file(path))
        stated = content.pop("xxh3")
        unchanged = stated == _checksum(content) and [size for size, _ in content["files"]] == [
            file.stat().st_size for file in files
        ]
        if unchanged and [checksum for _, checksum in content["files"]] == [_checksum_of_file(file) for file in files]:
            return content["result"]
        problem = "it or a file of its work was changed"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = repr(error)[:200]
    log.warning("%s cannot be used (%s); its work is done again", path, problem)
    return None


def _checksum(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _checksum_of_file(path: Path) -> str:
    """128-bit xxh3 of the whole file. OSError if it is no file."""
    found = xxhash.xxh3_128()
    with os.fdopen(open_file(path), "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()
