from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.byte_bpe_training import train_byte_bpe
from data_pipeline.tokenizers.tokenizer import load_tokenizer
from tests.data_pipeline.sets import Recorder, documents


def test_a_trained_tokenizer_is_lossless_and_has_the_wanted_size(tmp_path: Path) -> None:
    seen = Recorder()
    trained = train_byte_bpe(documents(100), tmp_path, vocab_size=300, progress=seen)
    assert (trained.file, trained.vocab_size) == (tmp_path / "tokenizer.json", 300)
    assert seen.done["reading text"] == trained.text_bytes
    loaded = load_tokenizer(tmp_path)
    assert (loaded.vocab_size, loaded.end_of_document, loaded.unknown) == (300, 299, None)
    for text in ("the cat\r\n \u4e2d\u2581\0 <|endoftext|>", *documents(5, seed=9)):
        assert loaded.decode(loaded.encode(text)) == text
    assert len(loaded.encode("the cat sat")) < 8


@pytest.mark.parametrize(
    ("vocab_size", "texts", "message"),
    [
        (256, ["a"], r"a vocabulary of 256 is too small; .*set --vocab-size to 257 or more"),
        (9999, ["the cat sat"], r"a vocabulary of 9999 is too large for this text .*the allowed range is 257 to \d+"),
        (300, [], r"there is no text to train a tokenizer on"),
    ],
)
def test_a_size_that_the_text_does_not_allow_is_refused(
    tmp_path: Path, vocab_size: int, texts: list[str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        train_byte_bpe(texts, tmp_path / "out", vocab_size=vocab_size)
    assert not (tmp_path / "out").exists()
