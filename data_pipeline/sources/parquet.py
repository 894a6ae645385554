"""Documents out of parquet, a few rows at a time."""

from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.errors import DataError
from data_pipeline.sources.files import Part
from data_pipeline.sources.records import NULL, ReadOptions, Record, decode_piece, missing_key


def read_parquet(file: BinaryIO, name: str, part: Part, options: ReadOptions) -> Iterator[Record]:
    file.seek(0)
    try:
        table = pq.ParquetFile(file)
        if options.text_key not in table.schema_arrow.names:
            raise missing_key(name, options.text_key, table.schema_arrow.names)
        kind = table.schema_arrow.field(options.text_key).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)):
            raise DataError(f"{name}: the column {options.text_key!r} holds {kind}, not text; set --text-key")
        groups = range(part.start, table.num_row_groups if part.end is None else part.end)
        number = 0
        for batch in table.iter_batches(256, row_groups=list(groups), columns=[options.text_key]):
            for value in batch.column(0).cast(pa.large_binary()).to_pylist():
                if value is None:
                    yield Record(None, NULL)
                else:
                    yield decode_piece(
                        value if len(value) <= options.max_document_bytes else None, name, number, options
                    )
                number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name} is damaged parquet: {error}; fetch it again") from None


def parquet_cuts(opened: BinaryIO, name: str, task_bytes: int) -> list[Part]:
    opened.seek(0)
    try:
        metadata = pq.ParquetFile(opened).metadata
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name} is damaged parquet: {error}; fetch it again") from None
    parts, start, size = [], 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= task_bytes or group == metadata.num_row_groups - 1:
            parts.append(Part(0, start, group + 1))
            start, size = group + 1, 0
    return parts
