import pytest

from data_pipeline.sources.formats import detect_format


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
def test_the_format_is_detected_by_content(head: bytes, name: str, kind: str) -> None:
    assert detect_format(head, name) == kind


@pytest.mark.parametrize(
    ("head", "name", "kind"),
    [
        (b'xt": "the head was cut off"}\n{"text": "a"}\n', "bad.jsonl", "jsonl"),
        (b'null\n{"text": "a"}\n', "x.JSONL.gz", "jsonl"),
        (b'null\n{"text": "a"}\n{"text": "b"}\n', "x", "jsonl"),
        (b"", "empty.jsonl", "jsonl"),
        (b'A text with one\n{"json": "line"}\nin it.\n', "x.txt", "text"),
    ],
)
def test_the_name_or_most_lines_decide_if_the_first_line_is_no_object(head: bytes, name: str, kind: str) -> None:
    assert detect_format(head, name) == kind
