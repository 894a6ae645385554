import json
import logging
from pathlib import Path

import pytest

from data_pipeline.build.options import BuildOptions
from data_pipeline.build.prepare import build_dataset
from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import Manifest
from data_pipeline.sources.records import ReadOptions
from tests.data_pipeline.tokenizers.test_loss import train_characters
from tests.data_pipeline.tokenizers.test_tokenizer import train_word_level

GOOD = json.dumps({"text": "the cat sat on a mat"}) + "\n"


def build(tmp_path: Path, tokenizer: Path, *files: Path, allow: bool = False, **read: object) -> Manifest:
    options = BuildOptions(seq_len=32, task_bytes=3000, validation_share=0.0, read=ReadOptions(**read))  # type: ignore[arg-type]
    inputs = [str(file) for file in files]
    manifest = build_dataset(inputs, tmp_path / "set", tokenizer, options, allow_unusable=allow)
    assert manifest is not None
    return manifest


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "long.txt",
            "the cat sat " * 1000,
            r"long.txt can be used \(1 x longer than the limit\); raise --max-document-mib",
        ),
        ("lines.jsonl", "no json\n" * 9, r"lines.jsonl can be used \(9 x line is not JSON\); give its --format"),
        ("many.jsonl", "no json\n" * 900, r"many.jsonl can be used \(900 x line is not JSON\)"),
        ("list.jsonl", '{"text": ["a"]}\n', r"list.jsonl can be used .*--text-key must lead to a string .*texts.0"),
    ],
)
def test_a_file_without_any_usable_document_is_refused_unless_that_is_allowed(
    tmp_path: Path, tokenizer: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "good.jsonl").write_text(GOOD)
    files = (tmp_path / name, tmp_path / "good.jsonl")
    with pytest.raises(DataError, match=message):
        build(tmp_path, tokenizer, *files, max_document_bytes=5000)
    manifest = build(tmp_path, tokenizer, *files, allow=True, max_document_bytes=5000)
    assert manifest.splits["train"].documents == 1


def test_documents_over_the_limit_are_counted_and_named(
    tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(GOOD * 100 + json.dumps({"text": "x" * 999}) + "\n" + GOOD)
    with caplog.at_level(logging.WARNING):
        build(tmp_path, tokenizer, file, max_document_bytes=500)
    assert f"dropped 1 longer than --max-document-mib (0): {file} record 101; raise it" in caplog.text


def test_the_text_key_is_judged_over_the_whole_file(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text((json.dumps({"title": "t" * 100}) + "\n") * 100 + GOOD * 100)
    manifest = build(tmp_path, tokenizer, file)
    assert (manifest.splits["train"].documents, manifest.counts["dropped: no text key"]) == (100, 100)


def test_a_key_that_no_part_of_a_file_has_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text((json.dumps({"title": "t" * 100}) + "\n") * 100)
    with pytest.raises(DataError, match=r"no row of .*a.jsonl has the key 'text' \(found: title\); set --text-key"):
        build(tmp_path, tokenizer, file)


def test_unknown_tokens_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = train_word_level(tmp_path / "words")
    (tmp_path / "a.jsonl").write_text(GOOD + json.dumps({"text": "a zebra sat"}) + "\n")
    with caplog.at_level(logging.WARNING):
        manifest = build(tmp_path, tokenizer, tmp_path / "a.jsonl")
    assert manifest.counts["unknown tokens"] == 1
    assert "1 of 11 tokens are the unknown token" in caplog.text


def test_characters_without_a_token_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = train_characters(tmp_path / "characters")
    (tmp_path / "a.jsonl").write_text(GOOD + json.dumps({"text": "the cat\u00e9 sa\u00e9 \u4e2d"}) + "\n")
    with caplog.at_level(logging.WARNING):
        manifest = build(tmp_path, tokenizer, tmp_path / "a.jsonl")
    assert manifest.counts["lost characters"] == 3
    assert "the tokenizer has no token for 3 characters, and they are lost" in caplog.text
