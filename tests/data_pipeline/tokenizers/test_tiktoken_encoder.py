import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.tokenizers.tiktoken_encoder import Encode, tiktoken_encoder
from tests.data_pipeline.tokenizers.test_tokenizer import train_byte_bpe

pytest.importorskip("tiktoken", reason="tiktoken, an optional dependency, is not installed")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_byte_bpe(tmp_path_factory.mktemp("bpe")) / "tokenizer.json"


def hugging_face(file: Path) -> Encode:
    loaded = tokenizers.Tokenizer.from_file(str(file))
    loaded.encode_special_tokens = True
    return lambda texts: [loaded.encode(text, add_special_tokens=False).ids for text in texts]


def changed(file: Path, out: Path, **changes: object) -> Path:
    content = json.loads(file.read_text())
    content.update(changes)
    out.write_text(json.dumps(content))
    return out


@given(texts=st.lists(st.text(st.characters(codec="utf-8")), max_size=4))
def test_tiktoken_gives_the_same_ids(file: Path, texts: list[str]) -> None:
    encode_batch = tiktoken_encoder(file, hugging_face(file))
    assert encode_batch is not None
    assert encode_batch(texts) == hugging_face(file)(texts)


def test_tiktoken_is_not_used_with_a_normalizer(file: Path, tmp_path: Path) -> None:
    assert tiktoken_encoder(changed(file, tmp_path / "x.json", normalizer={"type": "NFC"}), hugging_face(file)) is None


def test_tiktoken_is_not_used_if_merges_are_not_in_the_order_of_ids(file: Path, tmp_path: Path) -> None:
    model = json.loads(file.read_text())["model"]
    model["merges"] = model["merges"][::-1]
    assert tiktoken_encoder(changed(file, tmp_path / "x.json", model=model), hugging_face(file)) is None


def test_tiktoken_is_not_used_if_its_ids_differ(file: Path) -> None:
    encode = hugging_face(file)
    assert tiktoken_encoder(file, lambda texts: [[*ids, 1] for ids in encode(texts)]) is None


def test_a_batch_that_differs_is_encoded_by_hugging_face(file: Path) -> None:
    encode = hugging_face(file)
    calls: list[int] = []

    def changing(texts):
        """The right ids for the probes, other ids later."""
        calls.append(len(texts))
        return encode(texts) if len(calls) == 1 else [[7] for _ in texts]

    encode_batch = tiktoken_encoder(file, changing)
    assert encode_batch is not None
    assert encode_batch(["one", "two"]) == [[7], [7]]
