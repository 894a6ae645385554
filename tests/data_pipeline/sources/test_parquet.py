from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.errors import DataError
from data_pipeline.sources.files import InputFile, Part
from data_pipeline.sources.readers import read_records
from data_pipeline.sources.records import ReadOptions, Record


def read(file: Path, part: Part = Part(0), **options: Any) -> list[Record]:  # noqa: B008
    return list(read_records(InputFile(str(file), file.stat().st_size), part, ReadOptions(**options)))


def texts(file: Path, **options: Any) -> list[str | None]:
    return [record.text for record in read(file, **options)]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
)
def test_every_type_that_can_hold_text_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array(["a", None, "caf\u00e9"], pa.string()).cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "x")
    assert texts(tmp_path / "x") == ["a", None, "caf\u00e9"]
    pq.write_table(pa.table({"text": pa.chunked_array([column])}), tmp_path / "x", store_schema=False)
    assert texts(tmp_path / "x") == ["a", None, "caf\u00e9"]


def test_a_column_of_nulls_has_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.nulls(2)}), tmp_path / "x")
    assert read(tmp_path / "x") == [Record(None, "text is null")] * 2


def test_text_of_a_fixed_width_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([b"abc", None], pa.binary(3))}), tmp_path / "x")
    assert texts(tmp_path / "x") == ["abc", None]


ROWS = [{"meta": {"content": {"text": "a"}}, "texts": ["b", "c"]}, {"meta": None, "texts": []}]


@pytest.mark.parametrize(
    ("key", "wanted"),
    [("meta.content.text", ["a", None]), ("texts.1", ["c", None]), ("texts.0", ["b", None])],
)
def test_a_nested_column_is_read_by_a_key_with_dots(tmp_path: Path, key: str, wanted: list[str | None]) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "x")
    assert texts(tmp_path / "x", text_key=key) == wanted


def test_a_column_whose_name_has_dots_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"meta.text": ["a"], "b": [1]}), tmp_path / "x")
    assert texts(tmp_path / "x", text_key="meta.text") == ["a"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("meta", r"contains struct<.*name a field of it: --text-key meta.content"),
        ("texts", r"contains list<.*name an element of it, such as --text-key texts.0"),
        ("meta.other", r"no row of .* has the key 'meta.other' \(found: .*meta: struct<content"),
    ],
)
def test_a_nested_column_that_is_not_text_is_refused_with_the_way_out(tmp_path: Path, key: str, message: str) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "x")
    with pytest.raises(DataError, match=message):
        read(tmp_path / "x", text_key=key)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), tmp_path / "x")
    with pytest.raises(DataError, match=r"x has 2 columns named 'text'; rename one, or set --text-key"):
        read(tmp_path / "x")
    names = ["text", "a", "a"]
    pq.write_table(pa.Table.from_arrays([pa.array([n]) for n in ("t", "b", "c")], names=names), tmp_path / "x")
    assert texts(tmp_path / "x") == ["t"]


def test_records_are_numbered_over_the_whole_file(tmp_path: Path) -> None:
    column = pa.array([b"a", b"b", b"c", b"\xff"], pa.binary())
    pq.write_table(pa.table({"text": column}), tmp_path / "x", row_group_size=2)
    with pytest.raises(DataError, match=r"record 4 is not UTF-8"):
        read(tmp_path / "x", Part(0, 1, 2))


def test_a_file_that_is_only_named_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"x.parquet is named .parquet, but does not begin like parquet"):
        read(tmp_path / "x.parquet")
