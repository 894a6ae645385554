import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.tokenizer import KEEPSTEP_FILE, hashes, load_tokenizer, tokenizer_files
from tests.data_pipeline.sets import documents

CONTROL = "doc one </s> still doc one <|endoftext|> still one\n"


def train_byte_bpe(folder: Path, special: bool = True, vocab_size: int = 400) -> Path:
    """A Hugging Face tokenizer like GPT-2's, in `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(documents(300), trainer)
    end = AddedToken("<|endoftext|>", special=special)
    if special:
        tokenizer.add_special_tokens([end])
    else:
        tokenizer.add_tokens([end])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


def train_word_level(folder: Path) -> Path:
    """A Hugging Face tokenizer of whole words, with an unknown token, in `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]", "<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on a mat"], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


@pytest.fixture(scope="module")
def byte_bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_byte_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.mark.parametrize("kind", ["sentencepiece", "hugging face"])
def test_control_strings_in_a_document_are_text(kind: str, tokenizer: Path, byte_bpe: Path) -> None:
    loaded = load_tokenizer(tokenizer if kind == "sentencepiece" else byte_bpe)
    for ids in (loaded.encode(CONTROL), loaded.encode_batch([CONTROL, CONTROL])[1]):
        assert loaded.end_of_document not in ids
        assert loaded.decode(ids) == CONTROL


@given(text=st.text(st.characters(codec="utf-8")))
def test_a_byte_level_tokenizer_is_lossless(byte_bpe: Path, text: str) -> None:
    loaded = load_tokenizer(byte_bpe)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.encode_batch([text]) == [loaded.encode(text)]


def test_the_vocabulary_size_includes_added_tokens(byte_bpe: Path) -> None:
    loaded = load_tokenizer(byte_bpe)
    assert (loaded.vocab_size, loaded.end_of_document) == (401, 400)


def test_a_control_token_that_text_can_spell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not mark '<\|endoftext\|>' as special"):
        load_tokenizer(train_byte_bpe(tmp_path, special=False))


def test_the_end_of_document_token_must_be_known(byte_bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_bpe / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match=r"does not state which token ends a document"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, "<|endoftext|>").end_of_document == 400
    with pytest.raises(DataError, match=r"has no token '</s>'; name another with --end-of-document"):
        load_tokenizer(tmp_path, "</s>")


def test_a_sentencepiece_token_that_is_not_a_control_token_is_refused(tokenizer: Path) -> None:
    with pytest.raises(DataError, match=r"has no control token e; name one with --end-of-document"):
        load_tokenizer(tokenizer, "e")


def test_the_stored_files_name_the_end_of_document_token(byte_bpe: Path, tmp_path: Path) -> None:
    files = tokenizer_files(byte_bpe / "tokenizer.json", "<|endoftext|>")
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", KEEPSTEP_FILE}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).end_of_document == 400
    assert hashes(files)["tokenizer.json"] != hashes({"tokenizer.json": b""})["tokenizer.json"]


@pytest.mark.parametrize(("name", "content"), [("tokenizer.json", b"{}"), ("tokenizer.model", b"no model")])
def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} is not a"):
        load_tokenizer(tmp_path, "</s>")


def test_the_error_for_a_folder_without_a_tokenizer_says_how_to_train_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer in .*`keepstep data tokenizer` trains one"):
        load_tokenizer(tmp_path)


def test_a_beginning_of_document_token_must_be_a_control_token(tokenizer: Path, byte_bpe: Path) -> None:
    assert load_tokenizer(tokenizer, None, "<s>").beginning_of_document == 1
    assert load_tokenizer(tokenizer).beginning_of_document is None
    with pytest.raises(DataError, match=r"has no control token the; name another with --beginning-of-document"):
        load_tokenizer(tokenizer, None, "the")
    with pytest.raises(DataError, match=r"has no token '<s>'; name another with --beginning-of-document"):
        load_tokenizer(byte_bpe, None, "<s>")


def test_unknown_tokens_have_an_id_only_if_the_tokenizer_has_one(
    tokenizer: Path, byte_bpe: Path, tmp_path: Path
) -> None:
    assert load_tokenizer(byte_bpe).unknown is None
    assert load_tokenizer(tokenizer).unknown == 0
    assert load_tokenizer(train_word_level(tmp_path / "words")).unknown == 0
