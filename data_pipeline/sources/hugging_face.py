"""Streams the documents of a Hugging Face data set: `hf:NAME[@CONFIG][:SPLIT]`, NAME on the hub or a local path."""

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.errors import DataError
from data_pipeline.sources.files import InputFile
from data_pipeline.sources.records import ABSENT, TOO_LONG, ReadOptions, Record, missing_key, record_of_row, value_at
from data_pipeline.untrusted import check_file, in_one_line

_PREFIX = "hf:"
_SAVED_FILES = ("state.json", "dataset_dict.json")
"""Files that `save_to_disk` writes."""


def is_hugging_face(address: str) -> bool:
    """Whether the address names a Hugging Face data set."""
    return address.startswith(_PREFIX)


def parse_address(address: str) -> tuple[str, str | None, str]:
    """Name, config and split."""
    name, _, split = address.removeprefix(_PREFIX).partition(":")
    name, _, config = name.partition("@")
    return name, config or None, split or "train"


def list_hugging_face(address: str) -> list[InputFile]:
    """One entry for each shard of the data set that can be read separately. DataError if it cannot be opened."""
    shards, version = _open(address).num_shards, _local_version(parse_address(address)[0])
    return [InputFile(f"{address}#{number}/{shards}", None, version) for number in range(shards)]


def _local_version(name: str) -> str:
    """Changes when a file of a local data set does. Empty for a data set on the hub."""
    files = sorted(path for path in Path(name).rglob("*") if path.is_file())
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return xxhash.xxh3_64_hexdigest(json.dumps(states).encode()) if states else ""


def read_hugging_face(address: str, options: ReadOptions) -> Iterator[Record]:
    """The records of one shard, as `list_hugging_face` names it. DataError if no row has the text key."""
    whole, _, shard = address.partition("#")
    number, shards = map(int, shard.split("/"))
    rows = _open(whole).shard(num_shards=shards, index=number)
    first = list(islice(iter(rows), 1))
    if first and value_at(first[0], options.text_key) is ABSENT:
        raise missing_key(whole, options.text_key, first[0])
    for index, row in enumerate(rows):
        record = record_of_row(row, options, whole, index)
        too_long = record.text is not None and len(record.text) > options.max_document_bytes
        yield Record(None, TOO_LONG) if too_long else record


def _open(address: str) -> Any:
    """An iterable data set."""
    import datasets

    name, config, split = parse_address(address)
    try:
        for path in Path(name).rglob("*"):  # nothing, if it is no local folder
            if not path.is_dir():
                check_file(path)  # the library would wait for the writer of a FIFO
        if os.path.exists(name) and any((Path(name) / file).is_file() for file in _SAVED_FILES):  # noqa: PTH110 - a name is no path
            saved = datasets.load_from_disk(name)
            chosen = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
            return chosen.to_iterable_dataset()
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # the library and its dependencies raise many types
        said = in_one_line(error)
        raise DataError(f"cannot open {address} with `datasets`: {said}; check the name, config and split") from error
