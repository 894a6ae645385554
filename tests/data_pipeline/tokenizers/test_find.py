import shutil
from pathlib import Path

import pytest
import tokenizers
from sentencepiece import SentencePieceProcessor

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.find import find_tokenizer
from data_pipeline.tokenizers.tokenizer import load_tokenizer, tokenizer_files
from tests.data_pipeline.tokenizers.test_tokenizer import train_byte_bpe


def test_a_name_that_the_hub_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"no tokenizer in nobody/nothing: no such path, and the hub answers"):
        find_tokenizer("nobody/nothing")


def test_two_tokenizers_that_differ_are_refused_unless_one_file_is_named(tokenizer: Path, tmp_path: Path) -> None:
    folder = train_byte_bpe(tmp_path / "both", vocab_size=320)
    shutil.copy(tokenizer / "tokenizer.model", folder)
    with pytest.raises(DataError, match=r"are different tokenizers: 320 and 321 tokens; name the one to use, such as"):
        find_tokenizer(folder)
    for name, size in (("tokenizer.json", 321), ("tokenizer.model", 320)):
        end = "<|endoftext|>" if name.endswith("json") else "</s>"
        files = tokenizer_files(find_tokenizer(folder / name), end)
        stored = tmp_path / name
        stored.mkdir()
        for file, content in files.items():
            (stored / file).write_bytes(content)
        assert load_tokenizer(stored).vocab_size == size


def test_two_tokenizers_with_equal_ids_are_one(tokenizer: Path, tmp_path: Path) -> None:
    processor = SentencePieceProcessor(model_file=str(tokenizer / "tokenizer.model"))
    pieces = [(processor.id_to_piece(n), processor.get_score(n)) for n in range(processor.vocab_size())]
    vocabulary = {piece: number for number, (piece, _) in enumerate(pieces)}
    equal = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    shutil.copy(tokenizer / "tokenizer.model", tmp_path)
    equal.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"the text 'Hello, world!' has the ids"):
        find_tokenizer(tmp_path)
