import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import DataError
from data_pipeline.sources import splitting
from data_pipeline.sources.files import InputFile, Part
from data_pipeline.sources.readers import cut_file, read_records
from data_pipeline.sources.records import ReadOptions, Record, RecordError
from data_pipeline.sources.splitting import lines_that_begin_in, split, without_carriage_returns

CRLF = b"one\r\ntwo\r\n\r\nthree\rfour\r\n"


def read(path: Path, part: Part = Part(0), **options: Any) -> list[Record]:  # noqa: B008
    return list(read_records(InputFile(str(path), path.stat().st_size), part, ReadOptions(**options)))


def texts(path: Path, **options: Any) -> list[str | None]:
    return [record.text for record in read(path, **options)]


@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n"])
def test_separators_match_both_kinds_of_line_ends(tmp_path: Path, separator: str) -> None:
    (tmp_path / "a.txt").write_bytes(CRLF)
    (tmp_path / "b.txt").write_bytes(CRLF.replace(b"\r\n", b"\n"))
    for name in ("a.txt", "b.txt"):
        assert texts(tmp_path / name, separator=separator) == ["one\ntwo", "three\rfour\n"]


def test_carriage_returns_are_kept_if_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(CRLF)
    assert texts(tmp_path / "a.txt") == [CRLF.replace(b"\r\n", b"\n").decode()]
    assert texts(tmp_path / "a.txt", keep_carriage_returns=True) == [CRLF.decode()]
    assert texts(tmp_path / "a.txt", keep_carriage_returns=True, separator="\n")[0] == "one\r"


@pytest.mark.parametrize("separator", ["\n", "\r\n"])
@pytest.mark.parametrize("end", [b"", b"last", b"last\r"])
def test_a_cut_file_gives_the_same_lines_as_a_whole_one(tmp_path: Path, separator: str, end: bytes) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(CRLF + end)
    options = ReadOptions(separator=separator)
    parts = cut_file(InputFile(str(file), file.stat().st_size), options, 4)
    assert parts is not None
    cut = [record for part in parts for record in read(file, part, separator=separator)]
    assert cut == read(file, separator=separator)


def test_a_line_end_between_two_chunks_is_found() -> None:
    assert b"".join(without_carriage_returns([b"a\r", b"\nb\r", b"\r", b"\nc\r"])) == b"a\nb\r\nc\r"


def test_record_numbers_count_from_the_beginning_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": str(number)}).encode() for number in range(50)] + [b"", b'{"text": "caf\xe9"}']
    file.write_bytes(b"\n".join(lines))
    parts = cut_file(InputFile(str(file), file.stat().st_size), ReadOptions(), 100)
    assert parts is not None
    assert len(parts) > 3
    with pytest.raises(DataError, match=r"a.jsonl, record 52 is not UTF-8"):
        [read(file, part) for part in parts]


def test_the_error_of_a_record_crosses_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(RecordError("a", 0, "is bad").after(3)))
    assert str(error) == "a, record 4 is bad"


class _Counted:
    """A file that counts the bytes that are read."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at, self.bytes = content, 0, 0

    def seek(self, at: int) -> None:
        self.at = at

    def read(self, size: int) -> bytes:
        out = self.content[self.at : self.at + size]
        self.at += len(out)
        self.bytes += len(out)
        return out


def test_a_giant_line_is_read_once_whatever_the_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "READ_BYTES", 50)
    file = _Counted(b"x" * 100_000 + b"\nlast\n")
    parts = [Part(0, start, start + 1000) for start in range(0, 101_000, 1000)]
    lines = [line for part in parts for line in lines_that_begin_in(file, part, 1000)]  # type: ignore[arg-type]
    assert lines == [(None, True), (b"last", True)]
    assert file.bytes < 2.2 * len(file.content)


def test_splitting_copies_each_byte_a_few_times_only() -> None:
    class Chunk(bytes):
        copied = 0

        def __radd__(self, other: bytes) -> bytes:
            Chunk.copied += len(other) + len(self)
            return bytes(other) + bytes(self)

    ((piece, size),) = split([Chunk(b"x" * 10)] * 1000, b"\n\n", 1 << 20)
    assert (piece, size) == (b"x" * 10_000, 10_000)
    assert Chunk.copied < 20_000


NESTED = {"meta": {"content": {"text": "a"}}, "messages": [{"content": "b"}], "a.b": "c"}


@pytest.mark.parametrize(
    ("key", "text"),
    [("meta.content.text", "a"), ("messages.0.content", "b"), ("a.b", "c"), ("messages.1.content", None)],
)
def test_a_key_with_dots_leads_into_objects_and_lists(tmp_path: Path, key: str, text: str | None) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(NESTED) + "\n" + json.dumps({"messages": [{}, {"content": ""}]}))
    assert read(tmp_path / "a.jsonl", text_key=key)[0].text == text


@pytest.mark.parametrize(
    "pattern",
    [
        lambda folder: f"{folder}/web",
        lambda folder: f"{folder}/web/",
        lambda folder: f"{folder}/web/a.jsonl",
        lambda _: "*web/*",
    ],
)
def test_files_may_have_a_text_key_of_their_own(tmp_path: Path, pattern: Callable[[Path], str]) -> None:
    for name, key in (("web/a.jsonl", "body"), ("a.jsonl", "text")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({key: name}))
    keys = ((pattern(tmp_path), "body"),)
    for name in ("web/a.jsonl", "a.jsonl"):
        assert texts(tmp_path / name, text_keys=keys) == [name]
