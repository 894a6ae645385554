import base64
import json
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.tokenizers.tiktoken_encoder import GPT2_PATTERN, letter_of_byte
from data_pipeline.tokenizers.tokenizer import KEEPSTEP_FILE, load_tokenizer, tokenizer_files
from tests.data_pipeline.sets import documents
from tests.data_pipeline.tokenizers.test_tokenizer import train_byte_bpe

tiktoken = pytest.importorskip("tiktoken", reason="tiktoken, an optional dependency, is not installed")

TEXTS = [*documents(20), "cats' 12345\r\n\n caf\u00e9 \u4e2d\u6587 \U0001f600 <|endoftext|>", "", " "]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[bytes, int]:
    folder = train_byte_bpe(tmp_path_factory.mktemp("bpe"))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    byte_of = {letter: byte for byte, letter in letter_of_byte().items()}
    return {bytes(byte_of[letter] for letter in token): rank for token, rank in vocabulary.items()}


def write(folder: Path, ranks: dict[bytes, int], name: str = "mine.tiktoken", **stated: str) -> Path:
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (folder / name).write_bytes(b"".join(lines))
    if stated:
        (folder / KEEPSTEP_FILE).write_text(json.dumps(stated))
    return folder / name


@pytest.mark.parametrize("name", ["mine.tiktoken", "tokenizer.model"])
def test_a_file_of_tiktoken_gives_the_ids_of_tiktoken(tmp_path: Path, ranks: dict[bytes, int], name: str) -> None:
    write(tmp_path, ranks, name, pattern=GPT2_PATTERN)
    wanted = tiktoken.Encoding("x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
    (tmp_path / "stored").mkdir()
    for stored, content in tokenizer_files(tmp_path).items():
        (tmp_path / "stored" / stored).write_bytes(content)
    assert {path.name for path in (tmp_path / "stored").iterdir()} == {"tokenizer.json", KEEPSTEP_FILE}
    for folder in (tmp_path, tmp_path / name, tmp_path / "stored"):
        loaded = load_tokenizer(folder)
        assert [loaded.encode(text) for text in TEXTS] == [wanted.encode_ordinary(text) for text in TEXTS]
        assert loaded.encode_batch(TEXTS) == [wanted.encode_ordinary(text) for text in TEXTS]
        assert [loaded.decode(loaded.encode(text)) for text in TEXTS] == TEXTS
        assert (loaded.vocab_size, loaded.end_of_document) == (len(ranks) + 1, len(ranks))


def test_other_control_tokens_get_the_next_ids(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    file = write(tmp_path, ranks, pattern=GPT2_PATTERN)
    loaded = load_tokenizer(file, "<end>", "<begin>")
    assert (loaded.end_of_document, loaded.beginning_of_document) == (len(ranks), len(ranks) + 1)


def test_an_unknown_pattern_is_refused_with_the_way_out(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    with pytest.raises(DataError, match=r'has \d+ tokens and states no pattern .*keepstep.json: {"pattern": "REGEX"'):
        load_tokenizer(write(tmp_path, ranks))


def test_a_damaged_file_is_refused(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    file = write(tmp_path, ranks, pattern=GPT2_PATTERN)
    file.write_bytes(file.read_bytes() + b"%%% 7\n")
    with pytest.raises(DataError, match=rf"mine.tiktoken, line {len(ranks) + 1} is not a token in base64"):
        load_tokenizer(file)
    file.write_bytes(file.read_bytes().split(b"\n", 1)[1].rpartition(b"%%%")[0])
    with pytest.raises(DataError, match=r"mine.tiktoken has no token for byte \d+"):
        load_tokenizer(file)
