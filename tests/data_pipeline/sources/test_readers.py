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
from data_pipeline.sources import readers
from data_pipeline.sources.files import InputFile, Part
from data_pipeline.sources.readers import cuts, format_of, read_records, split
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


def test_rows_of_any_shape_give_their_text_or_the_reason(file: Path) -> None:
    file.write_text(MIXED)
    records = read(file)
    assert texts(records) == ["one", "one", "one", "two", "three"]
    assert [record.problem for record in records[5:]] == ["no text key", "text is null", "text is not a string"]


def test_records_keep_their_places_in_the_file(file: Path) -> None:
    file.write_text(EMPTY_FIRST)
    assert [record.text for record in read(file)] == ["", "hello world", "   \n", None, "bye", ""]


def test_another_text_key_is_taken(file: Path) -> None:
    file.write_text(MIXED)
    assert texts(read(file, text_key="content")) == ["no text key"]


def test_a_key_that_no_row_has_is_refused_with_the_keys_found(file: Path) -> None:
    file.write_text(MIXED)
    with pytest.raises(DataError, match=r"no row of .* has the key 'body' \(found: content, extra, meta, text\); set"):
        read(file, text_key="body")


def test_a_json_array_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "array.jsonl").write_text(ARRAY)
    with pytest.raises(DataError, match=r"array.jsonl is a JSON array, not one object a line; convert it: jq -c"):
        read(tmp_path / "array.jsonl")


def test_lines_that_are_not_json_objects_are_told(file: Path) -> None:
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


def test_lines_end_at_newline_alone(file: Path) -> None:
    text = "a\rb\x0bc\x0cd\x1ce\x85f\u2028g\u2029h"
    file.write_text(f"{text}\n{text}\n", newline="", encoding="utf-8")
    assert texts(read(file, separator="\n", format="text")) == [text, text]
    file.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", newline="", encoding="utf-8")
    assert texts(read(file)) == [text]


def test_text_is_one_document_a_file_or_split(file: Path) -> None:
    file.write_text("one\n\ntwo\n\nthree\n")
    assert texts(read(file)) == ["one\n\ntwo\n\nthree\n"]
    assert texts(read(file, separator="\n\n")) == ["one", "two", "three\n"]
    file.write_text("")
    assert texts(read(file)) == [""]
    assert read(file, separator="\n") == []


@pytest.mark.parametrize("content", [b"caf\xe9", b'{"text":"caf\xe9"}\n'])
def test_bytes_that_are_not_utf8_stop_or_are_mended(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"record 1 is not UTF-8 \(.* at byte \d+\).*--on-error replace"):
        read(file)
    assert read(file, on_error="replace") == [Record("caf\ufffd", mended=True)]


def test_a_lone_surrogate_stops_or_is_mended(file: Path) -> None:
    file.write_text('{"text":"a\\ud800b"}\n')
    with pytest.raises(DataError, match=r"record 1 has a lone surrogate.*--on-error replace"):
        read(file)
    (record,) = read(file, on_error="replace")
    assert record.mended
    assert record.text is not None
    assert record.text.encode().decode().startswith("a\ufffd")


def test_utf16_is_refused_by_name(file: Path) -> None:
    file.write_bytes("hello".encode("utf-16"))
    with pytest.raises(DataError, match=r"is UTF-16, not UTF-8; convert it: iconv"):
        read(file)


def test_compressed_files_are_read_by_content(file: Path) -> None:
    file.write_bytes(gzip.compress(MIXED[:40].encode()) + gzip.compress(MIXED[40:].encode()))
    assert texts(read(file)) == ["one", "one", "one", "two", "three"]
    file.write_bytes(zstandard.compress(b"text"))
    assert texts(read(file)) == ["text"]


def write_parquet(file: Path, column: Any, name: str = "text", row_group: int = 2) -> None:
    pq.write_table(pa.table({"id": list(range(len(column))), name: column}), file, row_group_size=row_group)


def test_parquet_gives_its_text_and_tells_nulls(file: Path) -> None:
    write_parquet(file, ["a", None, "b", ""])
    assert read(file) == [Record("a"), Record(None, "text is null"), Record("b"), Record("")]
    write_parquet(file, pa.array([b"a", b"\xff"], pa.binary()))
    assert read(file, on_error="replace") == [Record("a"), Record("\ufffd", mended=True)]


def test_parquet_without_the_text_is_refused(file: Path) -> None:
    write_parquet(file, [1, 2])
    with pytest.raises(DataError, match=r"the column 'text' holds int64, not text"):
        read(file)
    with pytest.raises(DataError, match=r"has the key 'body' \(found: id, text\)"):
        read(file, text_key="body")
    file.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(DataError, match=r"is damaged parquet"):
        read(file)


def test_large_parquet_is_cut_by_row_groups(file: Path) -> None:
    write_parquet(file, [str(number) for number in range(9)])
    parts = cuts(InputFile(str(file), file.stat().st_size), ReadOptions(), 1)
    assert parts is not None
    assert len(parts) == 5
    assert texts([record for part in parts for record in read(file, part)]) == [str(number) for number in range(9)]


lines = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n")), max_size=12)


@given(lines=lines, size=st.integers(1, 40), ends=st.booleans())
def test_a_file_cut_anywhere_gives_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int, ends: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "cut"
    file.write_text("\n".join(lines) + "\n" * ends, newline="", encoding="utf-8")
    length = file.stat().st_size
    whole = read(file, format="text", separator="\n")
    parts = [Part(0, start, min(start + size, length)) for start in range(0, length, size)]
    cut = [record for part in parts for record in read(file, part, format="text", separator="\n")]
    assert cut == whole


@given(
    data=st.text("ab-", max_size=60).map(str.encode),
    separator=st.sampled_from([b"-", b"--", b"-a-"]),
    size=st.integers(1, 9),
    limit=st.integers(1, 8),
)
def test_splitting_is_the_same_however_the_bytes_come(data: bytes, separator: bytes, size: int, limit: int) -> None:
    pieces = data.split(separator)
    expected = [piece if len(piece) <= limit else None for piece in (pieces[:-1] if not pieces[-1] else pieces)]
    stream = [data[start : start + size] for start in range(0, len(data), size)]
    out = list(split(stream, separator, limit))
    assert [piece for piece, _ in out] == expected
    assert sum(length for _, length in out) == len(data)


def test_a_document_over_the_limit_is_dropped_and_told(file: Path) -> None:
    file.write_text('{"text":"short"}\n{"text":"' + "x" * 1000 + '"}\n{"text":"last"}')
    assert [record.problem for record in read(file, max_document_bytes=100)] == [None, "longer than the limit", None]
    file.write_text("x" * 1000)
    assert read(file, max_document_bytes=100) == [Record(None, "longer than the limit")]


def test_memory_is_bounded_whatever_the_length_of_a_line(file: Path) -> None:
    """A line of 400 MB, under a limit of 1 MiB, in a process that grows by less than 60 MB."""
    with file.open("wb") as opened:
        opened.write(b'{"text":"' + b"x" * (400 << 20) + b'"}\n{"text":"last"}\n')
    program = (
        "import resource; from data_pipeline.sources.readers import *; from data_pipeline.sources.records import *\n"
        "from data_pipeline.sources.inputs import *\n"
        "import json, pathlib\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"records = list(read_records(InputFile({str(file)!r}, 0), Part(0), ReadOptions(max_document_bytes=1 << 20)))\n"
        "print(len(records), records[1].text, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    number, text, grown = done.stdout.split()
    assert (number, text) == ("2", "last")
    assert int(grown) < 60_000


@pytest.mark.parametrize(
    ("head", "name", "kind"),
    [
        (b"PAR1....", "x", "parquet"),
        (b'{"text": "a"}\n{"te', "x.txt", "jsonl"),
        (b'\xef\xbb\xbf {"text": "a"}\n', "x", "jsonl"),
        (b'{"text": \n', "x.jsonl", "jsonl"),
        (b"{\n  body { color: red }\n", "x.css", "text"),
        (b"[link](https://x)", "x.md", "text"),
        (b"", "x", "text"),
        (b'{"text": "' + b"x" * (1 << 16), "x", "jsonl"),
    ],
)
def test_the_format_is_known_by_content(head: bytes, name: str, kind: str) -> None:
    assert format_of(head, name) == kind


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Reads of odd sizes, so that every border is crossed."""
    if "memory" not in request.node.name:
        monkeypatch.setattr(readers, "READ_BYTES", 7)
    return
