from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.sources.inputs import list_inputs
from data_pipeline.sources.records import ReadOptions
from data_pipeline.tokenizers.sentencepiece_training import (
    MAX_SENTENCE_BYTES,
    cut_sentences,
    expected_bytes,
    sample_texts,
    train_sentencepiece,
)
from data_pipeline.tokenizers.tokenizer import load_tokenizer
from tests.data_pipeline.sets import Recorder, documents

TINY = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog"] * 20
CODE = "def f(x):\n\tif x:\n\t\treturn  1\n    # four spaces\n"
DIFFICULT = [
    CODE,
    "",
    " ",
    "  a  b ",
    "\ufb01",
    "e\u0301",
    "a\u2581b\u2581",
    "\u2585",
    "\0",
    "</s><s><unk><0x41>",
    "\r\n\ufeff",
]

Kind = Literal["bpe", "unigram"]


@pytest.mark.parametrize(("kind", "largest"), [("bpe", 307), ("unigram", 276)])
def test_a_vocabulary_too_large_for_the_text_is_refused_with_the_range(
    tmp_path: Path, kind: Kind, largest: int
) -> None:
    with pytest.raises(
        DataError, match=r"32000 is too large for this text \(60 pieces.*range is 272 to (\d+)"
    ) as error:
        train_sentencepiece(TINY, tmp_path, vocab_size=32_000, kind=kind)
    assert f"to {largest}:" in str(error.value)
    assert train_sentencepiece(TINY, tmp_path, vocab_size=largest, kind=kind).vocab_size == largest
    assert load_tokenizer(tmp_path).vocab_size == largest


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_vocabulary_too_small_for_the_text_is_refused_with_the_smallest_size(tmp_path: Path, kind: Kind) -> None:
    with pytest.raises(DataError, match=r"100 is too small for this text .* at least 272"):
        train_sentencepiece(TINY, tmp_path, vocab_size=100, kind=kind)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no text to train a tokenizer on"):
        train_sentencepiece([], tmp_path, vocab_size=300)


def test_one_long_line_is_cut_and_not_skipped(tmp_path: Path) -> None:
    trained = train_sentencepiece(["".join(documents(300)).replace("\n", " ")], tmp_path, vocab_size=300)
    assert trained.sentences > 5
    assert trained.text_bytes == sum(map(len, documents(300)))


@given(st.text(max_size=9000))
def test_sentences_make_up_the_text_and_stay_within_the_limit(text: str) -> None:
    sentences = list(cut_sentences(text))
    assert "".join(sentences) == text
    assert all(0 < len(sentence.encode(errors="surrogatepass")) <= MAX_SENTENCE_BYTES for sentence in sentences)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    train_sentencepiece([*documents(300), CODE, *DIFFICULT], folder, vocab_size=330, kind=request.param)
    return folder


@pytest.mark.parametrize("text", DIFFICULT)
def test_difficult_text_is_decoded_unchanged(trained: Path, text: str) -> None:
    tokenizer = load_tokenizer(trained)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(st.characters(codec="utf-8")))
def test_any_text_is_decoded_unchanged(trained: Path, text: str) -> None:
    tokenizer = load_tokenizer(trained)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(3 <= token < tokenizer.vocab_size for token in ids)  # control tokens are 0 to 2


def test_every_file_contributes_its_share_to_the_sample(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} line\n" * 100_000)
    files = list_inputs([str(tmp_path)])
    texts = list(sample_texts(files, ReadOptions(separator="\n"), 1 << 18))
    assert {text[0] for text in texts} == {"a", "b"}
    assert sum(map(len, texts)) < (1 << 18) + 100
    assert expected_bytes(files, 1 << 18) == 1 << 18
    assert expected_bytes(files, 1 << 28) is None


def test_the_progress_of_reading_is_reported_in_bytes_of_text(tmp_path: Path) -> None:
    seen = Recorder()
    trained = train_sentencepiece(TINY, tmp_path, vocab_size=300, expected_bytes=2000, progress=seen)
    assert list(seen.totals.items()) == [("reading text", 2000), ("training the tokenizer", None)]
    assert seen.done["reading text"] == trained.text_bytes
