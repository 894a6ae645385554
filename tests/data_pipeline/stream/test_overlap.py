import logging
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.stream.stream import open_stream
from tests.data_pipeline.sets import build, config, documents, edit_manifest, make_version_1

TEXTS = documents(200)


def open_both(first: Path, second: Path) -> None:
    open_stream(config(first, second), seq_len=32).close()


def test_a_validation_document_that_another_source_trains_on_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    build(tmp_path / "a", TEXTS, tokenizer, validation_share=0.2)
    build(tmp_path / "b", TEXTS[:150], tokenizer, validation_share=0.05)
    message = (
        r"\d+ validation documents of data.sources\[0\] .*a are trained on in data.sources\[1\] .*b; build both "
        r"with the same share: --validation-share 0.2"
    )
    with pytest.raises(DataError, match=message):
        open_both(tmp_path / "a", tmp_path / "b")


def test_the_way_out_works_where_a_small_source_has_one_validation_document(tokenizer: Path, tmp_path: Path) -> None:
    build(tmp_path / "a", TEXTS[:5], tokenizer, validation_share=1e-9)
    build(tmp_path / "b", TEXTS, tokenizer, validation_share=1e-9)
    with pytest.raises(DataError, match=r"1 validation documents of .*--validation-share (0\.\d+)") as error:
        open_both(tmp_path / "a", tmp_path / "b")
    share = float(str(error.value).rsplit(maxsplit=1)[1])
    for name, texts in (("c", TEXTS[:5]), ("d", TEXTS)):
        build(tmp_path / name, texts, tokenizer, validation_share=share)
    open_both(tmp_path / "c", tmp_path / "d")


def test_sources_without_common_documents_may_have_different_shares(tokenizer: Path, tmp_path: Path) -> None:
    build(tmp_path / "a", TEXTS[:100], tokenizer, validation_share=0.2)
    build(tmp_path / "b", TEXTS[100:], tokenizer, validation_share=0.0)
    open_both(tmp_path / "a", tmp_path / "b")


def test_sources_with_equal_shares_may_have_common_documents(tokenizer: Path, tmp_path: Path) -> None:
    build(tmp_path / "a", TEXTS, tokenizer, validation_share=0.2)
    build(tmp_path / "b", TEXTS[:150], tokenizer, validation_share=0.2)
    open_both(tmp_path / "a", tmp_path / "b")


def test_data_sets_of_earlier_versions_are_read_with_a_warning(
    tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, share in (("a", 0.2), ("b", 0.1)):
        build(tmp_path / name, TEXTS, tokenizer, validation_share=share)
    edit_manifest(tmp_path / "b", make_version_1)
    with caplog.at_level(logging.WARNING):
        open_both(tmp_path / "a", tmp_path / "b")
    assert "cannot check whether validation documents of data.sources[0]" in caplog.text
