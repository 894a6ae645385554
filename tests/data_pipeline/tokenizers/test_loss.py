"""Characters that a tokenizer drops are counted; what it keeps, or is meant to change, is not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from data_pipeline.tokenizers.loss import LossCounter
from data_pipeline.tokenizers.tokenizer import load_tokenizer
from tests.data_pipeline.tokenizers.test_tokenizer import train_byte_bpe, train_word_level

TEXT = "The cat\r\n\tsat \u00e9\u0301 \u4e2d\u6587 \U0001f600\u200d\x00\x07 </s> <unk> \u2581 \ufb01\n"


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


def train_characters(folder: Path) -> Path:
    """A tokenizer of the characters of one sentence, without an unknown token, in `folder`."""
    alphabet = sorted(set("the cat sat on a mat"))
    return save(Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, [])), folder)


def some_bytes(folder: Path) -> Path:
    """A byte-level tokenizer that lacks the byte C3, and whose file names no decoder."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"\u00c3"})
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return save(tokenizer, folder)


def lower_case_word_pieces(folder: Path) -> Path:
    """A tokenizer like BERT's, whose normalizer changes letters and removes accents."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = {piece: i for i, piece in enumerate(["[UNK]", *letters, *(f"##{letter}" for letter in letters)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return save(tokenizer, folder)


def count(folder: Path, *texts: str) -> int:
    return LossCounter(load_tokenizer(folder)).count(texts)


def test_a_sentencepiece_model_with_bytes_loses_nothing(tokenizer: Path) -> None:
    assert count(tokenizer, TEXT, TEXT) == 0


@pytest.mark.parametrize("make", [train_byte_bpe, train_word_level, lower_case_word_pieces])
def test_what_bytes_or_an_unknown_token_stand_for_is_not_lost(make: Callable[[Path], Path], tmp_path: Path) -> None:
    assert count(make(tmp_path / "made"), TEXT, "\u00c9t\u00e9 AND more") == 0


def test_each_character_without_a_token_counts_wherever_it_stands(tmp_path: Path) -> None:
    folder = train_characters(tmp_path / "made")
    assert count(folder, "the cat", "a mat\n") == 0
    assert count(folder, "the cat!", "\u00e9at\u00e9", "the") == 3
    assert count(folder, TEXT) == len([c for c in TEXT if not c.isspace() and c not in "the cat sat on a mat\u2581"])


def test_a_byte_without_a_token_loses_the_characters_that_have_it(tmp_path: Path) -> None:
    folder = some_bytes(tmp_path / "made")
    assert count(folder, "\u00e9t\u00e9 \u4e2d \x07") == 2
    assert load_tokenizer(folder).decode(load_tokenizer(folder).encode("the \u4e2d")) == "the \u4e2d"
