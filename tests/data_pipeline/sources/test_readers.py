import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.sources import splitting
from data_pipeline.sources.files import InputFile, Part
from data_pipeline.sources.readers import cut_file, read_records
from data_pipeline.sources.records import ReadOptions, Record

MIXED = """\
{"text":"one","meta":{"src":"a"}}
{"text":"one","meta":{"src":"a"}}
{"text":"one","meta":{"src":"a"}}
{"text":"two","meta":{"src":"b","symlink_target":"x"}}
{"text":"three","meta":null,"extra":[1,"q"]}
{"content":"no text key"}
{"text":null}
{"text":7}
"""
EMPTY_FIRST = '{"text":""}\n{"text":"hello world"}\n{"text":"   \\n"}\n\n{"text":"bye"}\n{"text":""}\n'
ARRAY = '[\n  {"text":"a"},\n  {"text":"b"},\n]\n'


def read(path: Path, part: Part = Part(0), **options: Any) -> list[Record]:  # noqa: B008
    return list(read_records(InputFile(str(path), path.stat().st_size), part, ReadOptions(**options)))


def texts(records: list[Record]) -> list[str]:
    return [record.text for record in records if record.text is not None]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_rows_of_any_shape_give_their_text_or_a_reason(file: Path) -> None:
    file.write_text(MIXED)
    records = read(file)
    assert texts(records) == ["one", "one", "one", "two", "three"]
    assert [record.problem for record in records[5:]] == ["no text key", "text is null", "text is not a string"]


def test_records_are_numbered_by_their_position_in_the_file(file: Path) -> None:
    file.write_text(EMPTY_FIRST)
    assert [record.text for record in read(file)] == ["", "hello world", "   \n", None, "bye", ""]


def test_another_text_key_can_be_chosen(file: Path) -> None:
    file.write_text(MIXED)
    assert texts(read(file, text_key="content")) == ["no text key"]


def test_a_key_that_no_row_has_is_refused_with_the_keys_found(file: Path) -> None:
    file.write_text(MIXED)
    with pytest.raises(DataError, match=r"no row of .* has the key 'body' \(found: content, extra, meta, text\); set"):
        read(file, text_key="body")


def test_a_json_array_is_refused(tmp_path: Path) -> None:
    (tmp_path / "array.jsonl").write_text(ARRAY)
    with pytest.raises(DataError, match=r"array.jsonl is a JSON array, not one object per line; convert it: jq -c"):
        read(tmp_path / "array.jsonl")


def test_lines_that_are_not_json_objects_give_a_reason(file: Path) -> None:
    file.write_text('{"text":"a"}\n{"text":\n[1]\n"x"\n' + "[" * 100_000 + '\n{"text":"b"}')
    assert [record.problem for record in read(file)] == [
        None,
        "line is not JSON",
        "line is not a JSON object",
        "line is not a JSON object",
        "line is not JSON",
        None,
    ]


@pytest.mark.parametrize("ending", [b"\r\n", b"\n"])
def test_a_byte_order_mark_counts_only_at_the_start(file: Path, ending: bytes) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + ending.join([b'{"text":"a"}', '{"text":"\ufeffb"}'.encode(), b""]))
    assert texts(read(file)) == ["a", "\ufeffb"]


def test_lines_end_only_at_newlines(file: Path) -> None:
    text = "a\rb\x0bc\x0cd\x1ce\x85f\u2028g\u2029h"
    file.write_text(f"{text}\n{text}\n", newline="", encoding="utf-8")
    assert texts(read(file, separator="\n", format="text")) == [text, text]
    file.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", newline="", encoding="utf-8")
    assert texts(read(file)) == [text]


def test_a_text_file_is_one_document_or_is_split(file: Path) -> None:
    file.write_text("one\n\ntwo\n\nthree\n")
    assert texts(read(file)) == ["one\n\ntwo\n\nthree\n"]
    assert texts(read(file, separator="\n\n")) == ["one", "two", "three\n"]
    file.write_text("")
    assert texts(read(file)) == [""]
    assert read(file, separator="\n") == []


@pytest.mark.parametrize("content", [b"caf\xe9", b'{"text":"caf\xe9"}\n'])
def test_bytes_that_are_not_utf8_stop_or_are_repaired(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"record 1 is not UTF-8 \(.* at byte \d+\).*--on-error replace"):
        read(file)
    assert read(file, on_error="replace") == [Record("caf\ufffd", repaired=True)]


def test_a_lone_surrogate_stops_or_is_repaired(file: Path) -> None:
    file.write_text('{"text":"a\\ud800b"}\n')
    with pytest.raises(DataError, match=r"record 1 has a lone surrogate.*--on-error replace"):
        read(file)
    (record,) = read(file, on_error="replace")
    assert record.repaired
    assert record.text == "a\ufffdb"
    file.write_bytes(b"a\xed\xa0\x80b\xed\xbf\xbf")
    assert texts(read(file, on_error="replace")) == ["a\ufffdb\ufffd"]


def test_utf16_is_refused(file: Path) -> None:
    file.write_bytes("hello".encode("utf-16"))
    with pytest.raises(DataError, match=r"is UTF-16, not UTF-8; convert it: iconv"):
        read(file)


def test_compression_of_files_is_detected_by_content(file: Path) -> None:
    file.write_bytes(gzip.compress(MIXED[:40].encode()) + gzip.compress(MIXED[40:].encode()))
    assert texts(read(file)) == ["one", "one", "one", "two", "three"]
    file.write_bytes(zstandard.compress(b"text"))
    assert texts(read(file)) == ["text"]


def write_parquet(file: Path, column: Any, name: str = "text", row_group: int = 2) -> None:
    pq.write_table(pa.table({"id": list(range(len(column))), name: column}), file, row_group_size=row_group)


def test_parquet_gives_its_text_and_a_reason_for_nulls(file: Path) -> None:
    write_parquet(file, ["a", None, "b", ""])
    assert read(file) == [Record("a"), Record(None, "text is null"), Record("b"), Record("")]
    write_parquet(file, pa.array([b"a", b"\xff"], pa.binary()))
    assert read(file, on_error="replace") == [Record("a"), Record("\ufffd", repaired=True)]


def test_parquet_without_the_text_is_refused(file: Path) -> None:
    write_parquet(file, [1, 2])
    with pytest.raises(DataError, match=r"the column 'text' contains int64, not text"):
        read(file)
    with pytest.raises(DataError, match=r"has the key 'body' \(found: id, text\)"):
        read(file, text_key="body")
    file.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(DataError, match=r"is damaged parquet"):
        read(file)


def test_large_parquet_is_cut_by_row_groups(file: Path) -> None:
    write_parquet(file, [str(number) for number in range(9)])
    parts = cut_file(InputFile(str(file), file.stat().st_size), ReadOptions(), 1)
    assert parts is not None
    assert len(parts) == 5
    assert texts([record for part in parts for record in read(file, part)]) == [str(number) for number in range(9)]


lines = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n")), max_size=12)


@given(lines=lines, size=st.integers(1, 40), ends=st.booleans())
def test_a_file_that_is_cut_anywhere_gives_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int, ends: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "cut"
    file.write_text("\n".join(lines) + "\n" * ends, newline="", encoding="utf-8")
    length = file.stat().st_size
    whole = read(file, format="text", separator="\n")
    parts = [Part(0, start, min(start + size, length)) for start in range(0, length, size)]
    cut = [record for part in parts for record in read(file, part, format="text", separator="\n")]
    assert cut == whole


def test_a_document_over_the_limit_gives_a_reason(file: Path) -> None:
    file.write_text('{"text":"short"}\n{"text":"' + "x" * 1000 + '"}\n{"text":"last"}')
    assert [record.problem for record in read(file, max_document_bytes=100)] == [None, "longer than the limit", None]
    file.write_text("x" * 1000)
    assert read(file, max_document_bytes=100) == [Record(None, "longer than the limit")]


def test_memory_is_bounded_for_a_line_of_any_length(file: Path) -> None:
    """Reads a line of 400 MB under a limit of 1 MiB in a process, which must grow by less than 60 MB."""
    with file.open("wb") as opened:
        opened.write(b'{"text":"' + b"x" * (400 << 20) + b'"}\n{"text":"last"}\n')
    program = (
        "import resource\n"
        "from data_pipeline.sources.files import InputFile, Part\n"
        "from data_pipeline.sources.readers import read_records\n"
        "from data_pipeline.sources.records import ReadOptions\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"records = list(read_records(InputFile({str(file)!r}, 0), Part(0), ReadOptions(max_document_bytes=1 << 20)))\n"
        "print(len(records), records[1].text, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    number, text, grown = done.stdout.split()
    assert (number, text) == ("2", "last")
    assert int(grown) < 60_000


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Small reads, so that lines cross the borders of chunks."""
    if "memory" not in request.node.name:
        monkeypatch.setattr(splitting, "READ_BYTES", 7)
