"""Reads documents from parquet, a few rows at a time."""

from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as types

from data_pipeline.errors import DataError
from data_pipeline.sources.files import Part
from data_pipeline.sources.records import (
    ABSENT,
    NULL,
    ReadOptions,
    Record,
    decode_piece,
    missing_key,
    value_at,
)
from data_pipeline.untrusted import in_one_line

_BATCH_ROWS = 256
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)
"""What pyarrow raises for files that are damaged, sizes that they state included."""


class _TextColumn(NamedTuple):
    """Where the text is: in a column, or at a path with dots below it."""

    name: str
    path: str
    """Empty: the column itself is the text."""


def read_parquet(file: BinaryIO, name: str, part: Part, options: ReadOptions) -> Iterator[Record]:
    """The records of the part's row groups. DataError if the file is damaged or has no text column of that name."""
    file.seek(0)
    try:
        table = pq.ParquetFile(file)
        column = _find_text(table.schema_arrow, name, options.text_key)
        groups = range(part.start, table.num_row_groups if part.end is None else part.end)
        number = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
        for batch in table.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=[column.name]):
            for value in _texts(batch.column(0), column.path):
                if value is None:
                    yield Record(None, NULL)
                else:
                    fits = len(value) <= options.max_document_bytes
                    yield decode_piece(value if fits else None, name, number, options)
                number += 1
    except _DAMAGE as error:
        raise _damaged(name, error) from None


def cut_parquet(file: BinaryIO, name: str, part_bytes: int) -> list[Part]:
    """Parts of whole row groups, each of about `part_bytes` uncompressed. DataError if the file is damaged."""
    file.seek(0)
    try:
        metadata = pq.ParquetFile(file).metadata
    except _DAMAGE as error:
        raise _damaged(name, error) from None
    parts, start, size = [], 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= part_bytes or group == metadata.num_row_groups - 1:
            parts.append(Part(0, start, group + 1))
            start, size = group + 1, 0
    return parts


def _find_text(schema: pa.Schema, name: str, key: str) -> _TextColumn:
    """The column of the text key, or the column and the path below it. DataError if it is not there or not text."""
    steps = key.split(".")
    heads = [".".join(steps[:length]) for length in range(len(steps), 0, -1)]
    head = next((head for head in heads if head in schema.names), None)
    if head is None:
        raise missing_key(name, key, schema.names)
    if schema.names.count(head) > 1:
        raise DataError(f"{name} has {schema.names.count(head)} columns named {head!r}; rename one, or set --text-key")
    path = key.removeprefix(head).removeprefix(".")
    kind = _type_below(schema.field(head).type, path)
    if kind is None:
        raise missing_key(name, key, [*schema.names, f"{head}: {schema.field(head).type}"])
    if not _is_text(kind):
        raise DataError(f"{name}: the column {key!r} contains {kind}, not text; {_remedy(kind, key)}")
    return _TextColumn(head, path)


def _type_below(kind: pa.DataType, path: str) -> pa.DataType | None:
    """The type at a path of field names and list positions; None if there is no such field."""
    for step in path.split(".") if path else ():
        if types.is_struct(kind) and kind.get_field_index(step) >= 0:
            kind = kind.field(step).type
        elif _is_list(kind) and step.isdecimal():
            kind = kind.value_type
        else:
            return None
    return kind


def _is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    """Whether the type can hold text. A column of nulls has no documents, but is no mistake."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.extension_name != "arrow.uuid" and _is_text(kind.storage_type)
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    is_string = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    is_binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return is_string or is_binary or types.is_fixed_size_binary(kind) or types.is_null(kind)


def _remedy(kind: pa.DataType, key: str) -> str:
    if types.is_struct(kind):
        fields = ", ".join(f"{key}.{kind.field(number).name}" for number in range(min(kind.num_fields, 20)))
        return f"name a field of it: --text-key {fields}"
    if _is_list(kind):
        return f"name an element of it, such as --text-key {key}.0, or join the elements first"
    return "set --text-key"


def _texts(column: pa.Array, path: str) -> Iterator[bytes | None]:
    """The bytes of each text; None for null, and for lists that are too short."""
    while path and types.is_struct(column.type):
        step, _, path = path.partition(".")
        column = pc.struct_field(column, step)  # pyright: ignore[reportAttributeAccessIssue]
    if path:  # leads into lists, whose lengths differ
        yield from (_as_bytes(value_at(value, path)) for value in column.to_pylist())
        return
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    yield from column.cast(pa.large_binary()).to_pylist()


def _as_bytes(value: Any) -> bytes | None:
    if value is None or value is ABSENT:
        return None
    return value.encode(errors="surrogatepass") if isinstance(value, str) else value


def _damaged(name: str, error: Exception) -> DataError:
    return DataError(f"{name} is damaged parquet: {in_one_line(error)}; fetch it again")
