"""Documents of a Hugging Face data set, streamed: `hf:NAME[@CONFIG][:SPLIT]`, NAME on the hub or a local path."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.sources.files import HUGGING_FACE, InputFile
from data_pipeline.sources.records import TOO_LONG, ReadOptions, Record, missing_key, text_of_row

_SAVED = ("state.json", "dataset_dict.json")  # written by save_to_disk


def parse(address: str) -> tuple[str, str | None, str]:
    """Name, config and split."""
    name, _, split = address.removeprefix(HUGGING_FACE).partition(":")
    name, _, config = name.partition("@")
    return name, config or None, split or "train"


def list_hugging_face(address: str) -> list[InputFile]:
    """One entry for each of the data set's files that can be read by itself."""
    shards = _open(address).num_shards
    return [InputFile(f"{address}#{number}/{shards}", None) for number in range(shards)]


def read_hugging_face(address: str, options: ReadOptions) -> Iterator[Record]:
    whole, _, shard = address.partition("#")
    number, shards = map(int, shard.split("/"))
    rows = _open(whole).shard(num_shards=shards, index=number)
    first = list(islice(iter(rows), 1))
    if first and options.text_key not in first[0]:
        raise missing_key(whole, options.text_key, first[0])
    for index, row in enumerate(rows):
        record = text_of_row(row, options, whole, index)
        too_long = record.text is not None and len(record.text) > options.max_document_bytes
        yield Record(None, TOO_LONG) if too_long else record


def _open(address: str) -> Any:
    """An iterable data set."""
    import datasets

    name, config, split = parse(address)
    try:
        if os.path.exists(name) and any((Path(name) / file).is_file() for file in _SAVED):  # noqa: PTH110 - a name is no path
            saved = datasets.load_from_disk(name)
            chosen = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
            return chosen.to_iterable_dataset()
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # whatever the library and those below it raise
        raise DataError(f"cannot open {address} with `datasets`: {error}; check the name, config and split") from error
