"""The bytes of tokens add up to the bytes of texts, for each kind of tokenizer."""

import json
from pathlib import Path

import pytest
import tokenizers

from data_pipeline.tokenizers.byte_bpe_training import train_byte_bpe
from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from data_pipeline.tokenizers.token_bytes import bytes_of_tokens
from data_pipeline.tokenizers.tokenizer import load_tokenizer

TEXTS = [f"def f{n}(x):\n    return x + {n}  # na\u00efve caf\u00e9 number {n}\n" for n in range(200)]
PROBES = [*TEXTS[:3], "\U0001f600 \u4e2d\u6587", "two  spaces\tand a tab", "x"]


def word_piece(folder: Path) -> None:
    folder.mkdir()
    model = tokenizers.models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(["</s>"])
    made.decoder = tokenizers.decoders.WordPiece()
    made.save(str(folder / "tokenizer.json"))
    (folder / "keepstep.json").write_text(json.dumps({"end_of_document": "</s>"}))


def unigram(folder: Path) -> None:
    folder.mkdir()
    letters = sorted({letter for text in [*TEXTS, *PROBES] for letter in text.replace(" ", "\u2581")})
    vocabulary = [("<unk>", 0.0), ("\u2581return", -1.0), *((letter, -5.0) for letter in letters)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, unk_id=0))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "keepstep.json").write_text(json.dumps({"end_of_document": "</s>"}))


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level", "unigram"])
def test_bytes_of_tokens_add_up_to_those_of_the_text(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    match kind:
        case "sentencepiece":
            train_sentencepiece(TEXTS, folder, vocab_size=400)
        case "byte-level":
            train_byte_bpe(TEXTS, folder, vocab_size=400)
        case _:
            unigram(folder)
    tokenizer, table = load_tokenizer(folder), bytes_of_tokens(folder)
    assert table is not None
    assert table.shape == (tokenizer.vocab_size,)
    assert table[tokenizer.end_of_document] == 0
    for text in PROBES:
        ids = tokenizer.encode(text)
        expected = len(text.encode())
        assert int(table[ids].sum()) - expected in ({0, 1} if kind != "byte-level" else {0}), text


def test_a_tokenizer_of_another_kind_gives_no_bytes(tmp_path: Path) -> None:
    word_piece(tmp_path / "tokenizer")
    assert bytes_of_tokens(tmp_path / "tokenizer") is None
