"""Writes and reads `manifest.json` and `files.json`.

The member `xxh3` of a manifest is the checksum of all others, and `files_xxh3` is that of `files.json`. Manifests of
version 1 have neither: their fingerprint covers the shards and the tokenizer, and `manifest_rules.py` compares counts.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash
from pydantic import TypeAdapter, ValidationError

from data_pipeline.atomic_file import write_atomic
from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import EARLIER_VALIDATION, FILES, NAME, VALIDATION, Manifest
from data_pipeline.shards.manifest_rules import problem_of
from data_pipeline.untrusted import parse_json

FORMAT = "keepstep-data"
VERSION = 2
_SHOWN = 200
"""Characters of a foreign text that a message quotes."""
_WITHOUT_CHECKSUM = 1
"""Version whose manifests have no checksum of their own."""

_MANIFEST = TypeAdapter(Manifest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` in the folder."""
    content = {"format": FORMAT, "version": VERSION, "fingerprint": manifest.fingerprint, **asdict(manifest)}
    write_atomic(folder / NAME, json.dumps({**content, "xxh3": checksum_of(content)}, indent=1).encode())


def checksum_of(content: dict[str, Any]) -> str:
    """xxh3 checksum of the members of a manifest: of their JSON with sorted keys, without spaces."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return xxhash.xxh3_64_hexdigest(canonical.encode())


def encode_files(addresses: Sequence[str]) -> bytes:
    """The content of `files.json`."""
    return json.dumps(list(addresses), indent=0).encode()


def parse_files(data: bytes, manifest: Manifest, address: str) -> list[str]:
    """The addresses of the input files, by number. DataError if the file was changed."""
    try:
        files = parse_json(data, surrogates=True)
        if manifest.files_xxh3 and xxhash.xxh3_64_hexdigest(data) != manifest.files_xxh3:
            raise ValueError("it does not match the checksum in the manifest")
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):  # pyright: ignore[reportUnknownVariableType]
            raise ValueError("it is not a list of addresses")
    except ValueError as error:
        raise DataError(
            f"{address}/{FILES} is damaged: {error}; restore it from a copy or build the data set again"
        ) from None
    return files  # pyright: ignore[reportUnknownVariableType]


def parse_manifest(data: bytes, address: str) -> Manifest:
    """The manifest in these bytes. DataError if they are not a manifest of a known version, or were changed."""
    try:
        content: dict[str, Any] = parse_json(data)
        _check_version(content, address)
        fingerprint = content["fingerprint"]
        members = {name: value for name, value in content.items() if name not in ("format", "version", "fingerprint")}
        splits: dict[str, Any] = members["splits"]
        members["splits"] = {VALIDATION if name == EARLIER_VALIDATION else name: splits[name] for name in splits}
        manifest = _MANIFEST.validate_json(json.dumps(members))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part)[:100] for part in first["loc"])
        raise _damaged(address, f"{where!r}: {first['msg']}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{address}/{NAME} is not a Keepstep manifest ({repr(error)[:_SHOWN]}); build the data set again"
        ) from None
    if manifest.fingerprint != fingerprint:
        raise _damaged(
            address,
            f"it states the fingerprint {str(fingerprint)[:_SHOWN]!r}, but its content has {manifest.fingerprint}",
        )
    if (problem := problem_of(manifest)) is not None:
        raise _damaged(address, problem)
    return manifest


def _check_version(content: dict[str, Any], address: str) -> None:
    """Removes the checksum from the content. DataError for an unknown version or a wrong checksum."""
    version = content["version"]
    if content["format"] != FORMAT or version not in (_WITHOUT_CHECKSUM, VERSION) or isinstance(version, bool):
        raise DataError(
            f"{address}/{NAME} has format {str(content['format'])[:_SHOWN]!r} version {str(version)[:_SHOWN]}; this "
            f"Keepstep reads {FORMAT} version {_WITHOUT_CHECKSUM} and {VERSION}: build the data set again"
        )
    if version == _WITHOUT_CHECKSUM:
        if content.keys() & {"xxh3", "files_xxh3"}:
            raise _damaged(address, f"version {version} has no checksums, but it states one")
        return
    stated = content.pop("xxh3", None)
    if stated != (found := checksum_of(content)):
        raise _damaged(address, f"it states the checksum {str(stated)[:_SHOWN]!r}, but its content has {found}")
    if not content.get("files_xxh3"):
        raise _damaged(address, f"it has no checksum of {FILES}")


def _damaged(address: str, problem: str) -> DataError:
    return DataError(f"{address}/{NAME} is damaged: {problem}; restore it from a copy or build the data set again")
