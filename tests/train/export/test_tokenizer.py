"""The exported tokenizer gives the ids of the data set's. Cases 17, 18 and 34."""

from pathlib import Path
from typing import Literal

import pytest
from transformers import AutoTokenizer

from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from data_pipeline.tokenizers.tokenizer import load_tokenizer
from train.export.tokenizer import equal_encodings, write_tokenizer

TEXTS = [
    "def f(x):\n\tif x:\n\t\treturn  1\n    # four spaces\n",
    "the cat sat on the mat; the dog sat on the log\n" * 5,
    "ﬁ 日本 \U0001f600\r\n",
    "doc one </s> <0x0A> still doc one <|endoftext|> still one <s> <unk>",
    "   a  b\t\n\n\n      c \x00\x01",
]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    kind: Literal["bpe", "unigram"] = request.param
    root = tmp_path_factory.mktemp(kind)
    train_sentencepiece(TEXTS * 20, root / "ours", vocab_size=300, kind=kind)
    write_tokenizer(root / "ours", 2, 64, root / "theirs")
    return root / "ours", root / "theirs"


def test_both_give_the_same_ids_on_spaces_tabs_bytes_and_control_strings(
    exported: tuple[Path, Path],
) -> None:
    ours, theirs = exported
    texts = [text for text in TEXTS if "</s>" not in text or ours.parent.name.startswith("bpe")]
    assert equal_encodings(load_tokenizer(ours), theirs, texts) == len(texts)


def test_decoding_returns_the_text(exported: tuple[Path, Path]) -> None:
    ours, theirs = exported
    tokenizer = AutoTokenizer.from_pretrained(theirs)
    for text in TEXTS:
        assert tokenizer.decode(load_tokenizer(ours).encode(text)) == text


def test_begin_and_end_are_the_end_of_document_and_nothing_is_added_to_a_text(exported: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported[1])
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.pad_token_id is None
    assert tokenizer.encode("the cat") == load_tokenizer(exported[0]).encode("the cat")
